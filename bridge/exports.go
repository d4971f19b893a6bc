//go:build cgo

// This file owns the way from C's types to those of package session.

package main

/*
#include <stdlib.h>
#include <string.h>
#include "stowage.h"

static inline uint64_t call_lend(stowage_lend f, void *context, uint64_t storage, uint64_t bytes) { return f(context, storage, bytes); }
*/
import "C"

import (
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"unsafe"

	"github.com/stowage-dev/stowage/bridge/session"
)

// handles are the sessions that callers hold, by number: C must not hold Go's pointers.
// A library has one process and no other place for them.
var handles struct {
	sync.Mutex
	last C.stowage_runtime
	open map[C.stowage_runtime]*opened
}

type opened struct {
	*session.Session
	mu   sync.Mutex
	rest []uint64 // left, and not told yet
}

// answer gives the code of an error and its sentence.
func answer(err error, why **C.char) C.int {
	if err == nil {
		return C.STOWAGE_OK
	}
	*why = C.CString(err.Error())
	var over *session.Overflow
	switch {
	case errors.As(err, &over):
		return C.STOWAGE_OVERFLOW
	case errors.As(err, new(session.Wrong)):
		return C.STOWAGE_USAGE
	}
	return C.STOWAGE_FAILED
}

// with does a call on a session. Nothing that panics here gets past it.
func with(rt C.stowage_runtime, why **C.char, fn func(*opened) error) (code C.int) {
	defer func() {
		if x := recover(); x != nil {
			code = answer(fmt.Errorf("stowage: %v", x), why)
		}
	}()
	handles.Lock()
	s := handles.open[rt]
	handles.Unlock()
	if s == nil {
		return answer(session.Wrong{Err: fmt.Errorf("stowage: %d is no runtime, or was closed", uint64(rt))}, why)
	}
	return answer(fn(s), why)
}

// tell writes what was left, as much as there is room for.
func (o *opened) tell(ids []uint64, left *C.stowage_left) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.rest = append(o.rest, ids...)
	if left == nil {
		return
	}
	n := put(o.rest, left)
	o.rest = o.rest[n:]
	left.more = C.uint64_t(len(o.rest))
}

// put writes ids, as many as there is room for.
func put(ids []uint64, into *C.stowage_left) int {
	n := min(len(ids), C.STOWAGE_LEFT)
	for i, id := range ids[:n] {
		into.id[i] = C.uint64_t(id)
	}
	into.count = C.uint64_t(n)
	return n
}

//export goVersion
func goVersion() *C.char { return C.CString(version()) }

// version is the module's, as the toolchain stamped it.
func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}

//export goOpen
func goOpen(config *C.char, lend C.stowage_lend, context unsafe.Pointer, rt *C.stowage_runtime, why **C.char) (code C.int) {
	defer func() {
		if x := recover(); x != nil {
			code = answer(fmt.Errorf("stowage: %v", x), why)
		}
	}()
	if config == nil || lend == nil || rt == nil {
		return answer(session.Wrong{Err: errors.New("stowage: a runtime is opened without a configuration, a lender or a place for its number")}, why)
	}
	cfg, err := session.Parse([]byte(C.GoString(config)))
	if err != nil {
		return answer(session.Wrong{Err: err}, why)
	}
	s, err := session.Open(cfg, func(storage, bytes uint64) uint64 {
		return uint64(C.call_lend(lend, context, C.uint64_t(storage), C.uint64_t(bytes)))
	})
	if err != nil {
		return answer(err, why)
	}
	handles.Lock()
	defer handles.Unlock()
	if handles.open == nil {
		handles.open = map[C.stowage_runtime]*opened{}
	}
	handles.last++
	handles.open[handles.last] = &opened{Session: s}
	*rt = handles.last
	return C.STOWAGE_OK
}

//export goClose
func goClose(rt C.stowage_runtime, why **C.char) C.int {
	return with(rt, why, func(s *opened) error {
		handles.Lock()
		delete(handles.open, rt)
		handles.Unlock()
		return s.Close()
	})
}

//export goBegin
func goBegin(rt C.stowage_runtime, key *C.char, stream C.uint64_t, why **C.char) C.int {
	return with(rt, why, func(s *opened) error { return s.Begin(C.GoString(key), uint64(stream)) })
}

//export goEnd
func goEnd(rt C.stowage_runtime, failed C.int, left *C.stowage_left, why **C.char) C.int {
	return with(rt, why, func(s *opened) error {
		ids, err := s.End(failed != 0)
		s.tell(ids, left)
		return err
	})
}

//export goSave
func goSave(rt C.stowage_runtime, name *C.char, count C.uint64_t, storages *C.stowage_storage, group *C.uint64_t, left *C.stowage_left, why **C.char) C.int {
	return with(rt, why, func(s *opened) error {
		all := make([]session.Storage, count)
		for i, x := range unsafe.Slice(storages, count) {
			all[i] = session.Storage{
				ID: uint64(x.id), Address: uint64(x.address), Bytes: uint64(x.bytes),
				Rows: uint64(x.rows), RowBytes: uint64(x.row_bytes), Stay: x.stay != 0,
			}
		}
		n, ids, err := s.Save(C.GoString(name), all)
		*group = C.uint64_t(n)
		s.tell(ids, left)
		return err
	})
}

//export goLoad
func goLoad(rt C.stowage_runtime, group C.uint64_t, held *C.stowage_left, left *C.stowage_left, why **C.char) C.int {
	return with(rt, why, func(s *opened) error {
		kept, ids, err := s.Load(uint64(group))
		n := put(kept, held)
		held.more = C.uint64_t(len(kept) - n)
		s.tell(ids, left)
		return err
	})
}

//export goRows
func goRows(rt C.stowage_runtime, storage C.uint64_t, address *C.uint64_t, why **C.char) C.int {
	return with(rt, why, func(s *opened) error {
		at, err := s.Rows(uint64(storage))
		*address = C.uint64_t(at)
		return err
	})
}

//export goRelease
func goRelease(rt C.stowage_runtime, group C.uint64_t, left *C.stowage_left, why **C.char) C.int {
	return with(rt, why, func(s *opened) error {
		ids, err := s.Release(uint64(group))
		s.tell(ids, left)
		return err
	})
}

//export goMore
func goMore(rt C.stowage_runtime, left *C.stowage_left, why **C.char) C.int {
	return with(rt, why, func(s *opened) error {
		s.tell(nil, left)
		return nil
	})
}

//export goCheck
func goCheck(rt C.stowage_runtime, stream C.uint64_t, why **C.char) C.int {
	return with(rt, why, func(s *opened) error { return s.Check(uint64(stream)) })
}

//export goStats
func goStats(rt C.stowage_runtime, text *C.char, capacity C.size_t, need *C.size_t, why **C.char) C.int {
	return with(rt, why, func(s *opened) error {
		got, err := s.Stats()
		if err != nil {
			return err
		}
		*need = C.size_t(len(got) + 1)
		if text != nil && capacity > 0 {
			into := unsafe.Slice((*byte)(unsafe.Pointer(text)), capacity)
			into[copy(into[:capacity-1], got)] = 0
		}
		return nil
	})
}

//export goTrace
func goTrace(rt C.stowage_runtime, path *C.char, why **C.char) C.int {
	return with(rt, why, func(s *opened) error {
		if path == nil {
			return s.Trace("")
		}
		return s.Trace(C.GoString(path))
	})
}
