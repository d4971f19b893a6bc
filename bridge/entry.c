//go:build cgo

// What happens before Go is entered: a process that was forked has none of Go's threads
// and would hang, so it is turned away here; and the sentence of a failure is kept for
// the thread that asks for it.

#include <pthread.h>
#include <stdlib.h>

#include "_cgo_export.h"
#include "stowage.h"

static volatile int forked;

/* The sentence of this thread. A library with Go in it has its thread-local memory in the
 * static block, of which a process has some 1.5 KiB to spare for all the libraries that
 * it loads later, and PyTorch has taken its part: a buffer there could not be loaded. */
static pthread_key_t sentence;

static void in_child(void) { forked = 1; }

__attribute__((constructor)) static void watch(void) {
    pthread_key_create(&sentence, free);
    pthread_atfork(NULL, NULL, in_child);
}

static int turned_away(void) { return forked; }

static int said(int code, char *why) {
    if (why != NULL) {
        free(pthread_getspecific(sentence));
        pthread_setspecific(sentence, why);
    }
    return code;
}

#define CALL(...) \
    char *why = NULL; \
    if (turned_away()) return STOWAGE_FORKED; \
    int code = (__VA_ARGS__); \
    return said(code, why);

int stowage_abi(void) { return STOWAGE_ABI; }

const char *stowage_error(void) {
    if (forked) return "stowage: this process was forked after the library was loaded, and cannot use it; start processes with spawn, or load the library after the fork";
    const char *why = pthread_getspecific(sentence);
    return why != NULL ? why : "";
}

static char *version;
static void ask_version(void) { version = goVersion(); }

const char *stowage_version(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (turned_away()) return "";
    pthread_once(&once, ask_version);
    return version;
}

int stowage_open(const char *config, stowage_lend lend, void *context, stowage_runtime *rt) {
    CALL(goOpen((char *)config, lend, context, rt, &why))
}
int stowage_close(stowage_runtime rt) { CALL(goClose(rt, &why)) }
int stowage_begin(stowage_runtime rt, const char *key, uint64_t stream) { CALL(goBegin(rt, (char *)key, stream, &why)) }
int stowage_end(stowage_runtime rt, int failed, stowage_left *left) { CALL(goEnd(rt, failed, left, &why)) }
int stowage_save(stowage_runtime rt, const char *name, uint64_t count, const stowage_storage *storages, uint64_t *group, stowage_left *left) {
    CALL(goSave(rt, (char *)name, count, (stowage_storage *)storages, group, left, &why))
}
int stowage_load(stowage_runtime rt, uint64_t group, stowage_left *held, stowage_left *left) { CALL(goLoad(rt, group, held, left, &why)) }
int stowage_rows(stowage_runtime rt, uint64_t storage, uint64_t *address) { CALL(goRows(rt, storage, address, &why)) }
int stowage_release(stowage_runtime rt, uint64_t group, stowage_left *left) { CALL(goRelease(rt, group, left, &why)) }
int stowage_more(stowage_runtime rt, stowage_left *left) { CALL(goMore(rt, left, &why)) }
int stowage_check(stowage_runtime rt, uint64_t stream) { CALL(goCheck(rt, stream, &why)) }
int stowage_stats(stowage_runtime rt, char *text, size_t capacity, size_t *need) { CALL(goStats(rt, text, capacity, need, &why)) }
int stowage_trace(stowage_runtime rt, const char *path) { CALL(goTrace(rt, (char *)path, &why)) }
