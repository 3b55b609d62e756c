/* The one pool of threads that all C kernels of the process share.
 *
 * A job is cut into parts which threads claim one by one, the caller among them. The caller waits
 * only for parts that were claimed: a worker that the system has put aside costs nothing but its
 * help. An OpenMP region waits for every thread to arrive, which on a busy machine takes a time
 * slice (milliseconds) for work of microseconds.
 *
 * Between jobs a worker spins for SPIN_NS, then sleeps. A second caller at the same time, or a
 * nested one, runs its parts alone. After fork() the child starts with no workers.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

typedef void (*task_function)(void *context, int part, int parts);

enum { MOST_WORKERS = 255, SPIN_NS = 100000 };

/* The job in hand. `ticket`: its number in the high half, the next part in the low half. A worker
 * that moves the ticket of job n forward knows that job n is open, so that the fields it read
 * after seeing n are job n's: they are rewritten only when every part is claimed and done. */
static _Atomic uint64_t ticket;
static _Atomic(task_function) job_task;
static _Atomic(void *) job_context;
static atomic_int job_parts, job_workers, parts_done;

static pthread_mutex_t callers = PTHREAD_MUTEX_INITIALIZER; /* one job at a time */
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static atomic_int sleeping;
static int workers;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Claims and runs parts of job `number` until none is left. */
static void help(uint32_t number, int worker) {
    for (;;) {
        uint64_t seen = atomic_load(&ticket);
        const task_function task = atomic_load_explicit(&job_task, memory_order_relaxed);
        void *context = atomic_load_explicit(&job_context, memory_order_relaxed);
        const int parts = atomic_load_explicit(&job_parts, memory_order_relaxed);
        if (worker >= atomic_load_explicit(&job_workers, memory_order_relaxed)) return;
        if ((uint32_t)(seen >> 32) != number || (int)(uint32_t)seen >= parts) return;
        if (!atomic_compare_exchange_strong(&ticket, &seen, seen + 1)) continue;
        task(context, (int)(uint32_t)seen, parts);
        atomic_fetch_add(&parts_done, 1);
    }
}

static uint32_t job_number(void) { return (uint32_t)(atomic_load(&ticket) >> 32); }

/* Waits for a job other than `last`; its number. */
static uint32_t next_job(uint32_t last) {
    const int64_t until = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < 16; i++) {
            if (job_number() != last) return job_number();
            relax();
        }
    } while (now_ns() < until);
    pthread_mutex_lock(&sleep_lock);
    atomic_fetch_add(&sleeping, 1);
    while (job_number() == last) pthread_cond_wait(&wake, &sleep_lock);
    atomic_fetch_sub(&sleeping, 1);
    pthread_mutex_unlock(&sleep_lock);
    return job_number();
}

static void *work(void *argument) {
    const int index = (int)(intptr_t)argument;
    for (uint32_t last = 0;;) {
        last = next_job(last);
        help(last, index);
    }
    return NULL;
}

static void forget_workers(void) {
    workers = 0;
    atomic_store(&sleeping, 0);
    pthread_mutex_init(&callers, NULL);
    pthread_mutex_init(&sleep_lock, NULL);
    pthread_cond_init(&wake, NULL);
}

static void start_workers(int wanted) {
    static int registered;
    if (!registered) registered = pthread_atfork(NULL, NULL, forget_workers) == 0;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the main thread's business */
    for (; workers < wanted; workers++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, (void *)(intptr_t)workers) != 0) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Runs task(context, i, parts) for i in [0, parts) on at most `threads` threads. */
__attribute__((visibility("default"))) void mi_pool_run(task_function task, void *context,
                                                        int parts, int threads) {
    const int helpers = threads - 1 < MOST_WORKERS ? threads - 1 : MOST_WORKERS;
    if (helpers < 1 || parts < 2 || pthread_mutex_trylock(&callers) != 0) {
        for (int i = 0; i < parts; i++) task(context, i, parts);
        return;
    }
    if (workers < helpers) start_workers(helpers);
    atomic_store_explicit(&job_task, task, memory_order_relaxed);
    atomic_store_explicit(&job_context, context, memory_order_relaxed);
    atomic_store_explicit(&job_parts, parts, memory_order_relaxed);
    atomic_store_explicit(&job_workers, helpers, memory_order_relaxed);
    atomic_store_explicit(&parts_done, 0, memory_order_relaxed);
    uint32_t number = job_number() + 1;
    if (number == 0) number = 1; /* 0 is what a new worker has seen */
    atomic_store(&ticket, (uint64_t)number << 32);
    if (atomic_load(&sleeping)) {
        pthread_mutex_lock(&sleep_lock);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&sleep_lock);
    }
    help(number, -1);
    for (int spins = 0; atomic_load(&parts_done) < parts; spins++) {
        if (spins < 2000) relax();
        else sched_yield(); /* a worker was put aside with a part in hand */
    }
    pthread_mutex_unlock(&callers);
}
