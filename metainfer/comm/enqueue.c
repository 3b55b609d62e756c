/* The driver calls of one collective, in order: steps that `enqueue.py` wrote down, in one call.
 *
 * The driver is not linked: its functions come as addresses. Stream, a and b of a step are offsets
 * behind `bases`, which are all that changes between two calls; c is a number.
 */
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

typedef struct {
    uint64_t offset[4];
    uint16_t base[3], kind;
} MiStep;

/* Kinds of steps; what a function of the driver carries out comes first, in the order of `calls`. */
enum { RECORD, FOLLOW, DOWN, UP, ACROSS, WRITE, AWAIT, LAUNCH, PUT };

typedef uint64_t u64;
typedef int (*OfEvent)(u64, u64);
typedef int (*Follow)(u64, u64, unsigned);
typedef int (*Copy)(u64, u64, size_t, u64);
typedef int (*Count)(u64, u64, u64, unsigned);
typedef int (*Launch)(u64, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, u64,
                      u64, u64);

/* Carry out `count` steps; how many were, which is the first failed one's place; its `status`. */
EXPORT u64 mi_enqueue(void *const *calls, const MiStep *steps, u64 count, const u64 *bases,
                      int *status);
u64 mi_enqueue(void *const *calls, const MiStep *steps, u64 count, const u64 *bases, int *status) {
    for (u64 at = 0; at < count; at++) {
        const MiStep *step = steps + at;
        const u64 stream = step->offset[0] + bases[step->base[0]];
        const u64 a = step->offset[1] + bases[step->base[1]];
        const u64 b = step->offset[2] + bases[step->base[2]];
        const u64 c = step->offset[3];
        int failed = 0;
        switch (step->kind) {
        case RECORD: failed = ((OfEvent)calls[RECORD])(a, stream); break;
        case FOLLOW: failed = ((Follow)calls[FOLLOW])(stream, a, 0); break;
        case DOWN: case UP: case ACROSS: failed = ((Copy)calls[step->kind])(a, b, c, stream); break;
        case WRITE: case AWAIT: failed = ((Count)calls[step->kind])(stream, a, b, 0); break;
        case LAUNCH:
            failed = ((Launch)calls[LAUNCH])(a, (unsigned)(c >> 32), 1, 1, (unsigned)c, 1, 1, 0, stream,
                                             b, 0);
            break;
        case PUT: *(u64 *)a = b; break;
        }
        if (failed) {
            *status = failed;
            return at;
        }
    }
    return count;
}
