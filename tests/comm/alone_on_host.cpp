// alone.cu as it is, on the host, with the threads of `kernels_on_host.cpp`.
#include "kernels_on_host.cpp"

#include "../../metainfer/comm/alone.cu"

struct AloneTask {
    const MiAlone *call;
    unsigned index;
};
static void *one_alone(void *argument) {
    const AloneTask *task = (const AloneTask *)argument;
    threadIdx.x = task->index;
    mi_alone(*task->call);
    return 0;
}

// `grid` blocks, one after another; 1 when an address was not aligned.
extern "C" __attribute__((visibility("default"))) int run_alone(const MiAlone *call, unsigned threads,
                                                                unsigned grid) {
    static pthread_t ids[512];
    static AloneTask tasks[512];
    gridDim.x = grid;
    blockDim.x = threads;
    misaligned = 0;
    pthread_barrier_init(&block_barrier, 0, threads);
    for (unsigned block = 0; block < grid; block++) {
        blockIdx.x = block;
        for (unsigned i = 0; i < threads; i++) {
            tasks[i] = {call, i};
            pthread_create(&ids[i], 0, one_alone, &tasks[i]);
        }
        for (unsigned i = 0; i < threads; i++) pthread_join(ids[i], 0);
    }
    return misaligned;
}
