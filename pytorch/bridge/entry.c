//go:build cgo

// This file owns what happens before Go is entered. A forked process has none of Go's
// threads and would hang, so every call returns STOWAGE_FORKED there. A callback that calls
// the runtime that it provides memory for would wait for itself, so that call returns
// STOWAGE_USAGE. The sentence of a failure is kept for the thread whose call failed.

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "_cgo_export.h"
#include "stowage.h"

static volatile int forked;

/* The sentence of this thread. It is not a thread-local variable: a library with Go in it
 * has these in the static block, of which a process has about 1.5 KiB for all libraries that
 * it loads later. PyTorch uses part of that, and the library could not be loaded. */
static pthread_key_t sentence;

/* The callbacks that this thread is inside of, the innermost first. */
static pthread_key_t callbacks;
struct callback {
    stowage_runtime rt;
    const struct callback *outer;
};

static void after_fork(void) { forked = 1; }

__attribute__((constructor)) static void register_handlers(void) {
    pthread_key_create(&sentence, free);
    pthread_key_create(&callbacks, NULL);
    pthread_atfork(NULL, NULL, after_fork);
}

static int keep_sentence(int code, char *why) {
    if (why != NULL) {
        free(pthread_getspecific(sentence));
        pthread_setspecific(sentence, why);
    }
    return code;
}

/* Asks the caller for memory. */
__attribute__((visibility("hidden"))) uint64_t stowage_ask(stowage_provide f, void *context, stowage_runtime rt, uint64_t storage, uint64_t bytes) {
    struct callback me = {rt, pthread_getspecific(callbacks)};
    pthread_setspecific(callbacks, &me);
    uint64_t at = f(context, storage, bytes);
    pthread_setspecific(callbacks, me.outer);
    return at;
}

/* Refuses a call from the callback of the same runtime. */
static int refuse_inside(void) {
    return keep_sentence(STOWAGE_USAGE, strdup("stowage: the callback that provides memory calls its own runtime, which waits for it; call the runtime after the call that asked has returned"));
}

static int inside_callback(stowage_runtime rt) {
    for (const struct callback *c = pthread_getspecific(callbacks); c != NULL; c = c->outer)
        if (c->rt == rt) return 1;
    return 0;
}

#define CALL(rt, ...) \
    char *why = NULL; \
    if (forked) return STOWAGE_FORKED; \
    if (inside_callback(rt)) return refuse_inside(); \
    int code = (__VA_ARGS__); \
    return keep_sentence(code, why);

int stowage_abi(void) { return STOWAGE_ABI; }

const char *stowage_error(void) {
    if (forked) return "stowage: this process was forked after the library was loaded and cannot use it; start processes with spawn, or load the library after the fork";
    const char *why = pthread_getspecific(sentence);
    return why != NULL ? why : "";
}

static char *version;
static void set_version(void) { version = goVersion(); }

const char *stowage_version(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (forked) return "";
    pthread_once(&once, set_version);
    return version;
}

int stowage_open(const char *config, stowage_provide provide, void *context, stowage_runtime *rt) {
    CALL(0, goOpen((char *)config, provide, context, rt, &why))
}
int stowage_close(stowage_runtime rt) { CALL(rt, goClose(rt, &why)) }
int stowage_begin(stowage_runtime rt, const char *key, uint64_t stream) { CALL(rt, goBegin(rt, (char *)key, stream, &why)) }
int stowage_end(stowage_runtime rt, int failed, stowage_ids *returned) { CALL(rt, goEnd(rt, failed, returned, &why)) }
int stowage_save(stowage_runtime rt, const char *name, uint64_t count, const stowage_storage *storages, uint64_t *group, stowage_ids *returned) {
    CALL(rt, goSave(rt, (char *)name, count, (stowage_storage *)storages, group, returned, &why))
}
int stowage_load(stowage_runtime rt, uint64_t group, stowage_ids *held, stowage_ids *returned) { CALL(rt, goLoad(rt, group, held, returned, &why)) }
int stowage_rows(stowage_runtime rt, uint64_t storage, uint64_t *address) { CALL(rt, goRows(rt, storage, address, &why)) }
int stowage_release(stowage_runtime rt, uint64_t group, stowage_ids *returned) { CALL(rt, goRelease(rt, group, returned, &why)) }
int stowage_more(stowage_runtime rt, stowage_ids *returned) { CALL(rt, goMore(rt, returned, &why)) }
int stowage_limit(stowage_runtime rt, uint64_t bytes) { CALL(rt, goLimit(rt, bytes, &why)) }
int stowage_usage(stowage_runtime rt, stowage_held *held) { CALL(rt, goUsage(rt, held, &why)) }
int stowage_check(stowage_runtime rt, uint64_t stream) { CALL(rt, goCheck(rt, stream, &why)) }
int stowage_stats(stowage_runtime rt, char *text, size_t capacity, size_t *need) { CALL(rt, goStats(rt, text, capacity, need, &why)) }
int stowage_choose(stowage_runtime rt, const char *request, char *text, size_t capacity, size_t *need) {
    CALL(rt, goChoose(rt, (char *)request, text, capacity, need, &why))
}
int stowage_gpu(const char *gpu, char *text, size_t capacity, size_t *need) { CALL(0, goGPU((char *)gpu, text, capacity, need, &why)) }
int stowage_trace(stowage_runtime rt, const char *path) { CALL(rt, goTrace(rt, (char *)path, &why)) }
