/* Stowage's C interface: the runtime for training loops in other languages.
 *
 * A runtime works on a device and a stream that exist already. The caller owns all device
 * memory of saved tensors; the runtime borrows it. The caller says what a step saves, in
 * the order of issue. The runtime copies storages to host memory, or their live rows to
 * berths of its own, and returns the borrowed memory: from then on the caller may free
 * it. When a storage is reloaded, the runtime asks the caller to provide memory again.
 * Events on streams order all of it; the host waits for nothing inside a step.
 *
 * Calls may come from any thread; calls on one runtime must not overlap. A call that fails
 * returns a code, and stowage_error returns a sentence that says what to do. A pointer that
 * is NULL returns STOWAGE_USAGE and changes nothing, except where NULL is said to mean
 * something. No function may be called in a child process after fork: calls return STOWAGE_FORKED.
 */
#ifndef STOWAGE_H
#define STOWAGE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The number of this interface. It changes when a structure, a code or a signature does. */
#define STOWAGE_ABI 3

enum {
    STOWAGE_OK = 0,
    STOWAGE_USAGE = 1,     /* wrong use: the sentence says what to change */
    STOWAGE_FAILED = 2,    /* the device or the machine failed; the step is lost */
    STOWAGE_FORKED = 3,    /* the process was forked after the library was loaded */
    STOWAGE_OVERFLOW = 4,  /* a step had more rows than room: run it again */
    STOWAGE_TOO_SMALL = 5, /* no plan keeps to the saved limit; stowage_usage has the least */
};

/* A runtime; zero is none. */
typedef uint64_t stowage_runtime;

/* Provides memory for a storage that is reloaded: returns the address of so many bytes of
 * device memory, which work issued on the step's stream from now on may use, or zero if
 * there is none. stowage_save, stowage_load and stowage_release call it on the calling
 * thread. It must not call the runtime: such a call returns STOWAGE_USAGE. */
typedef uint64_t (*stowage_provide)(void *context, uint64_t storage, uint64_t bytes);

/* A list of storages. As `returned`, the caller may free their memory now, in the order of
 * the step's stream; if memory was provided for a storage in the same call, the memory
 * that it had before is meant, the oldest first. If `returned` is NULL, they are listed by
 * the next call that is given a list. */
#define STOWAGE_IDS 510
typedef struct {
    uint64_t count; /* number of ids */
    uint64_t more;  /* not zero: call stowage_more for the rest */
    uint64_t id[STOWAGE_IDS];
} stowage_ids;

/* The most storages that one call of stowage_save takes. */
#define STOWAGE_STORAGES 1048576

/* One storage that a group saves. The caller numbers storages from one; a number names a
 * storage within a step. If another group saves the storage again, only its id is read,
 * unless all groups that saved it were released and its memory was returned: then it is a
 * new storage. */
typedef struct {
    uint64_t id;
    uint64_t address;
    uint64_t bytes;
    uint64_t rows;      /* address of the number of live rows (int64, aligned, device memory, read in the
                           order of the step's stream), or zero. The address of a storage with rows is a
                           multiple of 16. Its memory is returned at once, or when the last group that
                           saved it is released, or when the step ends */
    uint64_t row_bytes; /* of a storage with rows, which has a whole number of them */
    uint64_t stay;      /* not zero: never move it */
} stowage_storage;

/* What the runtime holds now. */
typedef struct {
    uint64_t saved;     /* borrowed memory of saved tensors, what is being copied out included */
    uint64_t rows;      /* borrowed memory of storages with rows that wait for their first berth */
    uint64_t own;       /* device memory that the runtime itself took: berths and bookkeeping */
    uint64_t limit;     /* the saved limit, or zero */
    uint64_t least;     /* the smallest limit that the last STOWAGE_TOO_SMALL would have accepted */
    uint64_t recording; /* not zero: the step under way is recorded and follows no plan */
} stowage_held;

int stowage_abi(void);
const char *stowage_version(void);

/* Returns the last failure of this thread in one sentence. It is valid until the thread's
 * next call. */
const char *stowage_error(void);

/* Opens a runtime. The configuration is JSON; an unknown key is an error:
 *   device       "cpu" or "cuda"
 *   ordinal      number of the GPU
 *   context      the driver's context (CUcontext) as a number; 0 is the primary one
 *   stream       the driver's stream (CUstream) that steps are issued on; 0 is the default one
 *   saved_limit  bytes of device memory for saved tensors; rows lie in berths, which do not
 *                count. 0 is no limit: everything is kept if there is no policy either
 *   host         bytes of pinned host memory; 0 is what the machine has free
 *   policy       {"moe_act": "offload", "core_attn": "keep", "expert_fc1": "stash"}; not with
 *                saved_limit
 *   least        storages of fewer bytes are never moved
 *   live         share of rows that are live at first: 0.5 makes berths for half of the rows
 *                of each storage. 0: the first step counts rows and leaves them in place
 *   rank         in messages and traces
 *   log          true writes warnings to standard error
 */
int stowage_open(const char *config, stowage_provide provide, void *context, stowage_runtime *rt);

/* Waits for the runtime's own work and closes it. A step that is under way is abandoned. */
int stowage_close(stowage_runtime rt);

/* Begins a step on a stream. Steps with the same key do the same work: the first is
 * recorded, later ones follow the plan that is made from it. If the stream is being
 * captured, the step becomes part of that graph; a step with that key must have run before.
 * Steps and replays use the same memory: the caller must see to it that a replay on another
 * stream is over, or waited for, before the next step or replay. */
int stowage_begin(stowage_runtime rt, const char *key, uint64_t stream);

/* Ends a step. If failed is not zero, the step is abandoned and nothing is learned from it.
 * Everything that was saved is forgotten; all borrowed memory is returned. */
int stowage_end(stowage_runtime rt, int failed, stowage_ids *returned);

/* Says that the forward pass of a group has been issued, and what it saved. Sets *group to
 * the group's number in this step. */
int stowage_save(stowage_runtime rt, const char *name, uint64_t count, const stowage_storage *storages, uint64_t *group, stowage_ids *returned);

/* Makes a group's storages usable by work issued from now on; memory was provided for those
 * that had been offloaded. Held lists the storages of the group whose memory a copy still
 * reads, or may read later because another group needs them: the caller may free all others
 * at any time, without waiting for returned. If held has no room for all, held->more is not
 * zero and every storage counts as held. */
int stowage_load(stowage_runtime rt, uint64_t group, stowage_ids *held, stowage_ids *returned);

/* Sets *address to the berth of a storage with rows: memory of the runtime of the same size,
 * in which the rows behind the live ones are zero and which nobody may write to; or to zero
 * if the storage's own memory was not returned. Work that the step's stream has or waits for
 * may read it until all groups that saved the storage are released, or the step ends. The
 * runtime asks for no memory for a storage with rows. */
int stowage_rows(stowage_runtime rt, uint64_t storage, uint64_t *address);

/* Says that nobody needs the group any more. Its number cannot be used again. */
int stowage_release(stowage_runtime rt, uint64_t group, stowage_ids *returned);

/* Returns more of what the last call could not list. */
int stowage_more(stowage_runtime rt, stowage_ids *returned);

/* Changes the saved limit of a runtime that was opened with one. A recorded step that is
 * under way keeps to a lower limit from its next call on; a step that follows a plan keeps to
 * its plan. The plan made at its end and all later steps keep to the new limit. The next
 * stowage_begin makes a new plan for its key from the recorded step if it needs one,
 * and may return STOWAGE_TOO_SMALL. */
int stowage_limit(stowage_runtime rt, uint64_t bytes);

/* Says what the runtime holds now, inside or outside of a step. */
int stowage_usage(stowage_runtime rt, stowage_held *held);

/* Checks whether all steps since the last check, abandoned ones and replays included, had
 * room for all rows, and makes berths for rows that have none yet. It waits for the stream,
 * which must come after all these steps; nothing may use rows meanwhile. STOWAGE_OVERFLOW:
 * there was too little room, the results of these steps are invalid, and now there is more
 * room. An overflow is reported once. */
int stowage_check(stowage_runtime rt, uint64_t stream);

/* Writes statistics as JSON, at most capacity bytes with the closing zero; sets *need to the
 * number of bytes that all of it takes. If text is NULL, nothing is written. */
int stowage_stats(stowage_runtime rt, char *text, size_t capacity, size_t *need);

/* Writes events of all later steps to a file that `stowage report` reads; NULL ends it. */
int stowage_trace(stowage_runtime rt, const char *path);

#ifdef __cplusplus
}
#endif
#endif
