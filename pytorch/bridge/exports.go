//go:build cgo

// This file converts between C's types and those of package session.

package main

/*
#include <stdlib.h>
#include <string.h>
#include "stowage.h"

uint64_t stowage_ask(stowage_provide f, void *context, stowage_runtime rt, uint64_t storage, uint64_t bytes);
*/
import "C"

import (
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"sync"
	"unsafe"

	"github.com/stowage-dev/stowage/internal/version"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/cost"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/pytorch/bridge/internal/session"
)

// handles are the sessions that callers hold, by number: C must not hold Go's pointers.
// They and links are the library's only global state.
var handles struct {
	sync.Mutex
	last C.stowage_runtime
	open map[C.stowage_runtime]*opened
}

// links measures each device once in a process.
var links session.Links

type opened struct {
	*session.Session
	mu   sync.Mutex
	rest []uint64 // returned storages that are not reported yet
}

// codeOf returns the code of an error and sets its sentence.
func codeOf(err error, why **C.char) C.int {
	if err == nil {
		return C.STOWAGE_OK
	}
	*why = C.CString(err.Error())
	switch {
	case errors.As(err, new(*session.Overflow)):
		return C.STOWAGE_OVERFLOW
	case errors.As(err, new(*session.TooSmall)):
		return C.STOWAGE_TOO_SMALL
	case errors.As(err, new(session.Wrong)):
		return C.STOWAGE_USAGE
	}
	return C.STOWAGE_FAILED
}

// call runs a call on a session if it has the arguments that it needs. A panic becomes a
// failure.
func call(rt C.stowage_runtime, why **C.char, fn func(*opened) error, needed ...argument) (code C.int) {
	defer func() {
		if x := recover(); x != nil {
			code = codeOf(fmt.Errorf("stowage: %v", x), why)
		}
	}()
	handles.Lock()
	s := handles.open[rt]
	handles.Unlock()
	if s == nil {
		return codeOf(session.Wrong{Err: fmt.Errorf("stowage: %d is no runtime, or was closed", uint64(rt))}, why)
	}
	for _, a := range needed {
		if a.at == nil {
			return codeOf(session.Wrong{Err: fmt.Errorf("stowage: %s is NULL; give %s", a.name, a.what)}, why)
		}
	}
	return codeOf(fn(s), why)
}

// argument is a pointer that a call cannot do without.
type argument struct {
	at         unsafe.Pointer
	name, what string
}

func pointer[T any](at *T, name, what string) argument {
	return argument{unsafe.Pointer(at), name, what}
}

// readStorages reads what the caller saves. It returns an error if there is no such memory:
// a wrong count or pointer must not end the process.
func readStorages(count C.uint64_t, storages *C.stowage_storage) (all []session.Storage, err error) {
	switch {
	case count > C.STOWAGE_STORAGES:
		return nil, session.Wrong{Err: fmt.Errorf("stowage: a group saves %d storages; give at most %d at a time", uint64(count), C.STOWAGE_STORAGES)}
	case count > 0 && storages == nil:
		return nil, session.Wrong{Err: fmt.Errorf("stowage: storages is NULL; give the %d storages that the group saves", uint64(count))}
	}
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if recover() != nil {
			all, err = nil, session.Wrong{Err: fmt.Errorf("stowage: %d storages at %p lie outside of this process's memory; give the right pointer and count", uint64(count), storages)}
		}
	}()
	all = make([]session.Storage, count)
	for i, x := range unsafe.Slice(storages, count) {
		all[i] = session.Storage{
			ID: uint64(x.id), Address: uint64(x.address), Bytes: uint64(x.bytes),
			Rows: uint64(x.rows), RowBytes: uint64(x.row_bytes), Stay: x.stay != 0,
		}
	}
	return all, nil
}

// report lists returned storages, as many as there is room for.
func (o *opened) report(ids []uint64, returned *C.stowage_ids) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.rest = append(o.rest, ids...)
	if returned == nil {
		return
	}
	n := writeIDs(o.rest, returned)
	o.rest = o.rest[n:]
	returned.more = C.uint64_t(len(o.rest))
}

// writeIDs writes ids, as many as there is room for, and returns how many.
func writeIDs(ids []uint64, into *C.stowage_ids) int {
	n := min(len(ids), C.STOWAGE_IDS)
	for i, id := range ids[:n] {
		into.id[i] = C.uint64_t(id)
	}
	into.count = C.uint64_t(n)
	return n
}

//export goVersion
func goVersion() *C.char { return C.CString(version.Number()) }

//export goOpen
func goOpen(config *C.char, provide C.stowage_provide, context unsafe.Pointer, rt *C.stowage_runtime, why **C.char) (code C.int) {
	defer func() {
		if x := recover(); x != nil {
			code = codeOf(fmt.Errorf("stowage: %v", x), why)
		}
	}()
	if config == nil || provide == nil || rt == nil {
		return codeOf(session.Wrong{Err: errors.New("stowage: cannot open a runtime without a configuration, a callback that provides memory and a place for its number")}, why)
	}
	cfg, err := session.Parse([]byte(C.GoString(config)))
	if err != nil {
		return codeOf(session.Wrong{Err: err}, why)
	}
	handles.Lock()
	handles.last++
	number := handles.last
	handles.Unlock()
	s, err := links.Open(cfg, func(storage, bytes uint64) uint64 {
		return uint64(C.stowage_ask(provide, context, number, C.uint64_t(storage), C.uint64_t(bytes)))
	})
	if err != nil {
		return codeOf(err, why)
	}
	handles.Lock()
	defer handles.Unlock()
	if handles.open == nil {
		handles.open = map[C.stowage_runtime]*opened{}
	}
	handles.open[number] = &opened{Session: s}
	*rt = number
	return C.STOWAGE_OK
}

//export goClose
func goClose(rt C.stowage_runtime, why **C.char) C.int {
	return call(rt, why, func(s *opened) error {
		handles.Lock()
		delete(handles.open, rt)
		handles.Unlock()
		return s.Close()
	})
}

//export goBegin
func goBegin(rt C.stowage_runtime, key *C.char, stream C.uint64_t, why **C.char) C.int {
	return call(rt, why, func(s *opened) error { return s.Begin(C.GoString(key), uint64(stream)) },
		pointer(key, "key", "the key of the step, which may be empty"))
}

//export goEnd
func goEnd(rt C.stowage_runtime, failed C.int, returned *C.stowage_ids, why **C.char) C.int {
	return call(rt, why, func(s *opened) error {
		ids, err := s.End(failed != 0)
		s.report(ids, returned)
		return err
	})
}

//export goSave
func goSave(rt C.stowage_runtime, name *C.char, count C.uint64_t, storages *C.stowage_storage, group *C.uint64_t, returned *C.stowage_ids, why **C.char) C.int {
	return call(rt, why, func(s *opened) error {
		all, err := readStorages(count, storages)
		if err != nil {
			return err
		}
		n, ids, err := s.Save(C.GoString(name), all)
		*group = C.uint64_t(n)
		s.report(ids, returned)
		return err
	}, pointer(name, "name", "the name of the group"), pointer(group, "group", "a place for the group's number"))
}

//export goLoad
func goLoad(rt C.stowage_runtime, group C.uint64_t, held *C.stowage_ids, returned *C.stowage_ids, why **C.char) C.int {
	return call(rt, why, func(s *opened) error {
		kept, ids, err := s.Load(uint64(group))
		n := writeIDs(kept, held)
		held.more = C.uint64_t(len(kept) - n)
		s.report(ids, returned)
		return err
	}, pointer(held, "held", "a list for the storages that are still read"))
}

//export goRows
func goRows(rt C.stowage_runtime, storage C.uint64_t, address *C.uint64_t, why **C.char) C.int {
	return call(rt, why, func(s *opened) error {
		at, err := s.Rows(uint64(storage))
		*address = C.uint64_t(at)
		return err
	}, pointer(address, "address", "a place for the address"))
}

//export goRelease
func goRelease(rt C.stowage_runtime, group C.uint64_t, returned *C.stowage_ids, why **C.char) C.int {
	return call(rt, why, func(s *opened) error {
		ids, err := s.Release(uint64(group))
		s.report(ids, returned)
		return err
	})
}

//export goMore
func goMore(rt C.stowage_runtime, returned *C.stowage_ids, why **C.char) C.int {
	return call(rt, why, func(s *opened) error {
		s.report(nil, returned)
		return nil
	}, pointer(returned, "returned", "a list for the storages"))
}

//export goLimit
func goLimit(rt C.stowage_runtime, bytes C.uint64_t, why **C.char) C.int {
	return call(rt, why, func(s *opened) error { return s.SetLimit(memory.Bytes(bytes)) })
}

//export goUsage
func goUsage(rt C.stowage_runtime, held *C.stowage_held, why **C.char) C.int {
	return call(rt, why, func(s *opened) error {
		u, err := s.Usage()
		*held = C.stowage_held{
			saved: C.uint64_t(u.Saved), rows: C.uint64_t(u.Rows), own: C.uint64_t(u.Own),
			limit: C.uint64_t(u.Limit), least: C.uint64_t(u.Least),
		}
		if u.Recording {
			held.recording = 1
		}
		return err
	}, pointer(held, "held", "a place for the figures"))
}

//export goCheck
func goCheck(rt C.stowage_runtime, stream C.uint64_t, why **C.char) C.int {
	return call(rt, why, func(s *opened) error { return s.Check(uint64(stream)) })
}

//export goStats
func goStats(rt C.stowage_runtime, text *C.char, capacity C.size_t, need *C.size_t, why **C.char) C.int {
	return call(rt, why, func(s *opened) error {
		got, err := s.Stats()
		if err == nil {
			writeText(got, text, capacity, need)
		}
		return err
	}, pointer(need, "need", "a place for the number of bytes"))
}

// writeText writes a text and its closing zero, as much as there is room for, and how many
// bytes all of it takes.
func writeText(got []byte, text *C.char, capacity C.size_t, need *C.size_t) {
	*need = C.size_t(len(got) + 1)
	if text != nil && capacity > 0 {
		into := unsafe.Slice((*byte)(unsafe.Pointer(text)), min(capacity, *need))
		into[copy(into[:len(into)-1], got)] = 0
	}
}

//export goChoose
func goChoose(rt C.stowage_runtime, request, text *C.char, capacity C.size_t, need *C.size_t, why **C.char) C.int {
	return call(rt, why, func(s *opened) error {
		got, err := s.Choose(C.GoString(request))
		if err == nil {
			writeText(got, text, capacity, need)
		}
		return err
	}, pointer(request, "request", "the description of the step"), pointer(need, "need", "a place for the number of bytes"))
}

// figures is the answer of stowage_gpu; stowage.h documents the keys.
type figures struct {
	Name     string       `json:"name"`
	Memory   memory.Bytes `json:"memory"`
	Usable   memory.Bytes `json:"usable"`
	Products float64      `json:"products"`
	HBM      float64      `json:"hbm"`
	Out      float64      `json:"out"`
	In       float64      `json:"in"`
	Both     float64      `json:"both"`
}

//export goGPU
func goGPU(gpu, text *C.char, capacity C.size_t, need *C.size_t, why **C.char) (code C.int) {
	defer func() {
		if x := recover(); x != nil {
			code = codeOf(fmt.Errorf("stowage: %v", x), why)
		}
	}()
	if gpu == nil || need == nil {
		return codeOf(session.Wrong{Err: errors.New("stowage: give the name of a GPU and a place for the number of bytes")}, why)
	}
	name := C.GoString(gpu)
	var g *hardware.GPU
	var err error
	if strings.HasPrefix(strings.TrimSpace(name), "{") {
		g, err = hardware.Parse([]byte(name))
	} else {
		g, err = hardware.ByName(name)
	}
	if err != nil {
		return codeOf(session.Wrong{Err: fmt.Errorf("stowage: %w", err)}, why)
	}
	products, bandwidth := cost.Reached(g)
	got, err := json.Marshal(figures{g.Name, g.Memory, g.Usable, products, bandwidth, g.HostOut, g.HostIn, g.HostBoth})
	if err != nil {
		return codeOf(err, why)
	}
	writeText(got, text, capacity, need)
	return C.STOWAGE_OK
}

//export goTrace
func goTrace(rt C.stowage_runtime, path *C.char, why **C.char) C.int {
	return call(rt, why, func(s *opened) error {
		if path == nil {
			return s.Trace("")
		}
		return s.Trace(C.GoString(path))
	})
}
