/* Stowage's C interface: the runtime for training loops in other languages.
 *
 * A runtime works on a device and a stream that exist already. The caller owns all
 * device memory: it says what a step saves, in the order of issue; the runtime copies
 * storages to host memory, or their live rows to memory of its own, and says when the
 * caller may free them; and it asks for memory (lend) when those on the host come back.
 * All of it is ordered by events on streams; the host waits for nothing inside a step.
 *
 * Calls may come from any thread; those of one runtime follow each other. A call that
 * fails returns its code, and stowage_error says in one sentence what to do. Nothing may
 * be called in a child process after fork: calls return STOWAGE_FORKED.
 */
#ifndef STOWAGE_H
#define STOWAGE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define STOWAGE_ABI 2

enum {
    STOWAGE_OK = 0,
    STOWAGE_USAGE = 1,    /* wrong use: the sentence says what to change */
    STOWAGE_FAILED = 2,   /* the device or the machine failed; the step is lost */
    STOWAGE_FORKED = 3,   /* the process was forked after the library was loaded */
    STOWAGE_OVERFLOW = 4, /* a step had more rows than room: run it again */
};

/* A runtime; zero is none. */
typedef uint64_t stowage_runtime;

/* Memory that a storage comes back to: the address of so many bytes of device memory,
 * which work issued on the step's stream from now on may use, or zero if there is none.
 * It is called by stowage_save, stowage_load and stowage_release, on the calling thread,
 * and must not call the runtime. */
typedef uint64_t (*stowage_lend)(void *context, uint64_t storage, uint64_t bytes);

/* Storages whose memory the caller may free now, in the order of the step's stream. Of one
 * that was lent memory in the same call it is the memory before: the one held longest. */
#define STOWAGE_LEFT 510
typedef struct {
    uint64_t count; /* of ids */
    uint64_t more;  /* not zero: call stowage_more for the rest */
    uint64_t id[STOWAGE_LEFT];
} stowage_left;

/* One storage that a group saves. Ids are the caller's, from one, and name a storage
 * within a step; saved again by another group, only the id is looked at, unless all that
 * saved it before were released and it was left: then it is a new one. */
typedef struct {
    uint64_t id;
    uint64_t address;
    uint64_t bytes;
    uint64_t rows;      /* address of the number of live rows (int64, aligned, device memory, read in the
                           order of the step's stream), or zero; such a storage begins at a
                           multiple of 16 bytes, and is left at once, or with the last group that
                           saved it, or when the step ends */
    uint64_t row_bytes; /* of a storage with rows, which is a whole number of them */
    uint64_t stay;      /* not zero: it is not to be moved */
} stowage_storage;

int stowage_abi(void);
const char *stowage_version(void);

/* The last failure of this thread, one sentence; valid until its next call. */
const char *stowage_error(void);

/* Opens a runtime. The configuration is JSON; unknown keys are refused:
 *   device   "cpu" or "cuda"
 *   ordinal  of the GPU
 *   context  the driver's context (CUcontext) as a number; 0 is the primary one
 *   stream   the driver's stream (CUstream) that steps are issued on; 0 is the default one
 *   budget   bytes of device memory for saved activations, rows aside; 0 is no budget: without
 *            a policy either, everything is kept
 *   host     bytes of pinned host memory; 0 is what the machine leaves
 *   policy   {"moe_act": "offload", "core_attn": "keep", "expert_fc1": "stash"}; not with a budget
 *   least    bytes below which a storage never leaves
 *   live     share of rows that are live, to begin with: 0.5 makes room for half of the rows
 *            of each storage. 0: the first step counts them, and they stay where they are
 *   rank     in messages and traces
 *   log      true writes warnings to standard error
 */
int stowage_open(const char *config, stowage_lend lend, void *context, stowage_runtime *rt);

/* Waits for the runtime's own work and ends it. A step under way is given up. */
int stowage_close(stowage_runtime rt);

/* Begins a step on a stream. Steps of one key are alike: the first is recorded, later
 * ones follow the plan made from it. A stream that is being captured makes the step part
 * of that graph; then there must have been a step of that key before. Steps and replays
 * use the same memory: the caller sees to it that a replay on another stream is over, or
 * waited for, before the next of either. */
int stowage_begin(stowage_runtime rt, const char *key, uint64_t stream);

/* Ends it. Not zero in failed gives it up: nothing is learned from it. Everything that
 * was saved is forgotten; all memory is left. */
int stowage_end(stowage_runtime rt, int failed, stowage_left *left);

/* Says that the forward pass of a group has been issued, and what it saved. Group gets
 * its number in this step. */
int stowage_save(stowage_runtime rt, const char *name, uint64_t count, const stowage_storage *storages, uint64_t *group, stowage_left *left);

/* Makes a group's storages usable by work issued from now on; those that were away have
 * been lent memory. Held gets those of its storages whose memory a copy still reads, or may
 * read later because another group needs them: the caller may free all others when it
 * likes, without waiting for left. If there are more than held has room for, none. */
int stowage_load(stowage_runtime rt, uint64_t group, stowage_left *held, stowage_left *left);

/* Where a storage with rows is: in memory of the runtime's, of the same size, where the rows
 * behind the live ones are zero and which nobody may write to; or zero, if it was not
 * left. It can be used, by work that the step's stream has or waits for, until all groups
 * that saved it are released, or the step ends. Unlike other storages one with rows is
 * lent no memory. */
int stowage_rows(stowage_runtime rt, uint64_t storage, uint64_t *address);

/* Says that nobody needs the group any more. */
int stowage_release(stowage_runtime rt, uint64_t group, stowage_left *left);

/* More of what the last call left. */
int stowage_more(stowage_runtime rt, stowage_left *left);

/* Looks whether all steps since the last check, those given up and replays of captured ones
 * too, had room for all rows, and makes room for those that had none yet; waits for the
 * stream, which must come after all of them: nothing may use rows meanwhile.
 * STOWAGE_OVERFLOW: there was too little, the results of these steps mean nothing, and now
 * there is more. A failure is told once; then as well the results mean nothing. */
int stowage_check(stowage_runtime rt, uint64_t stream);

/* Writes figures as JSON, at most capacity bytes with the closing zero; need gets how
 * many it takes. */
int stowage_stats(stowage_runtime rt, char *text, size_t capacity, size_t *need);

/* Writes events of all later steps to a file that `stowage report` reads; NULL ends it. */
int stowage_trace(stowage_runtime rt, const char *path);

#ifdef __cplusplus
}
#endif
#endif
