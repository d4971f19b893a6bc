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
#define STOWAGE_ABI 4

enum {
    STOWAGE_OK = 0,
    STOWAGE_USAGE = 1,     /* wrong use: the sentence says what to change */
    STOWAGE_FAILED = 2,    /* the device or the machine failed; the step is lost */
    STOWAGE_FORKED = 3,    /* the process was forked after the library was loaded */
    STOWAGE_OVERFLOW = 4,  /* a step had more rows than room: run it again */
    STOWAGE_TOO_SMALL = 5, /* nothing keeps to the limit; stowage_usage has the least that would do */
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

/* Says what to do with what a step saves: keep it, offload it or recompute it. The request
 * describes the step as JSON; an unknown key is an error. Sizes are in bytes, times in
 * nanoseconds:
 *   limit      bytes of device memory that storages may hold at any time
 *   storages   sizes of storages, which are numbered from 0
 *   units      what has one choice, numbered from 0, each with
 *                name, layer   which differ between units
 *                offload       true if it may be offloaded
 *                recompute_ns  time to recompute it for one microbatch; 0: it cannot be
 *   ops        events in the order of issue, each with its time in `at`: the work of compute
 *              itself before it, without waits
 *                {"op": "save", "unit": 0, "microbatch": 0, "storages": [0, 1], "stay": [false, true], "at": 5}
 *                  the forward pass of the unit was issued and saves storages; those that
 *                  `stay` are never offloaded. `stay` and `microbatch` may be left out
 *                {"op": "load", "unit": 0, "microbatch": 0, "at": 7}
 *                  what comes next needs them again
 *                {"op": "release", "unit": 0, "microbatch": 0, "at": 9}
 *                  nobody needs them any more
 *                {"op": "take", "storage": 5, "at": 1} and {"op": "give", "storage": 5, "at": 2}
 *                  somebody holds a storage from take to give, whether it is saved or not. A
 *                  storage that is saved is held from its first save to its last if these are
 *                  left out
 *              A unit is saved, loaded and released once for each microbatch, in this order.
 *              If it is used more often, number the uses as microbatches
 *   span       time of the whole step
 *   offload    true if anything may be offloaded
 *   recompute  true if anything may be recomputed
 *   links      {"out": 55e9, "in": 55e9, "both": 0, "latency_ns": 0}: bytes per second to and
 *              from host memory alone, and of both at once (0: their sum). If it is left out,
 *              the device is measured, at most once in a process
 *   drag       part of the time of copies by which compute takes longer beside them, from 0,
 *              which is meant if it is left out, to 1. Choices allow for it; forecasts do not
 *   host       bytes of host memory that may be used; 0 or left out: what this runtime has
 *   effort     part of the usual search, such as 0.1; 0 or left out: all of it
 * Memory is counted and not placed: what storages hold is the sum of their sizes. Storages
 * that are copied count until compute waits for their copies.
 *
 * The answer is JSON:
 *   choices       "keep", "offload" or "recompute" for every unit
 *   nothing       true if everything fits and is kept
 *   step_ns, before_ns     forecast of the step's time, with the choices and with everything kept
 *   peak, before_peak      the most bytes that storages hold at once, likewise
 *   moved         bytes that are offloaded
 *   waiting_ns    time that compute waits for copies
 *   copying_ns    time of copies, in both directions
 *   again_ns      time of recomputation
 *   tried         number of candidates
 *   notes         sentences for people
 * It is written as stowage_stats does it. The answer to the last request is remembered, so
 * asking for its size first costs nothing. The call may come inside of a step and outside; it
 * does nothing on the device unless it measures, which it refuses inside of a captured step.
 * STOWAGE_TOO_SMALL: no choices keep to the limit, and stowage_usage has the smallest that
 * would do. */
int stowage_choose(stowage_runtime rt, const char *request, char *text, size_t capacity, size_t *need);

/* Writes the figures of a GPU as JSON, as stowage_stats does it. gpu is a name such as "h100",
 * or the JSON of a file that `stowage plan --gpu` takes. STOWAGE_USAGE: there is no such GPU,
 * and the sentence lists those there are. Sizes are in bytes, rates in a second:
 *   name           its name
 *   memory         its memory
 *   usable         what is left of that for the allocator of a framework
 *   products, hbm  operations of matrix products in bf16 and bytes of its memory, as far as
 *                  training reaches them
 *   out, in, both  bytes to and from host memory, alone and both at once */
int stowage_gpu(const char *gpu, char *text, size_t capacity, size_t *need);

/* Writes events of all later steps to a file that `stowage report` reads; NULL ends it. */
int stowage_trace(stowage_runtime rt, const char *path);

#ifdef __cplusplus
}
#endif
#endif
