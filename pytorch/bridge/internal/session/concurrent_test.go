// This file owns the test of calls that come from several goroutines at once.

package session

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// Calls run with the session's lock, whatever they return, and leave it free.
func TestCallsHoldTheLock(t *testing.T) {
	s := opened(t, `{"device": "cpu"}`, nil)
	for name, call := range map[string]func(fn func() error) error{
		"guard":          s.guard,
		"guardReturning": func(fn func() error) error { _, err := s.guardReturning(fn); return err },
	} {
		ran := 0
		err := call(func() error {
			if ran++; s.mu.TryLock() {
				t.Errorf("a call in %s runs without the lock", name)
				s.mu.Unlock()
			}
			return nil
		})
		if err != nil || ran != 1 || !s.mu.TryLock() {
			t.Fatalf("%s: %v, %d calls, or the lock is not free", name, err, ran)
		}
		s.mu.Unlock()
	}
}

// SPEC S6.4: calls may come from any goroutine. Run under the race detector, this test
// notices a call without the session's lock.
func TestCallsAtTheSameTime(t *testing.T) {
	provided := map[uint64][]byte{} // written by the session's calls, which come one at a time
	times := 0
	s, err := Open(Config{
		Device: "cpu", Live: 0.5, Limit: 6000, Links: memory.Links{Out: 1e9, In: 1e9, Both: 1e9},
	}, func(id, n uint64) uint64 {
		provided[id] = aligned(t, int(n))
		times++
		return address(provided[id])
	})
	if err != nil {
		t.Fatal(err)
	}
	const callers, groups, size = 4, 6, 960
	for step := range 3 {
		if err := s.Begin("k", 0); err != nil {
			t.Fatal(err)
		}
		var mu sync.Mutex
		returned := map[uint64]int{}
		free := func(ids []uint64) {
			mu.Lock()
			defer mu.Unlock()
			for _, id := range ids {
				returned[id]++
			}
		}
		times = 0
		var wg sync.WaitGroup
		for caller := range uint64(callers) {
			wg.Go(func() {
				var mine []uint64
				for g := range uint64(groups) {
					id := 1 + caller*groups + g
					b, count := aligned(t, size), aligned(t, 8)
					for i := range b {
						b[i] = byte(id)
					}
					x := Storage{ID: id, Address: address(b), Bytes: size}
					if g%3 == 2 {
						count[0] = 7
						x.Rows, x.RowBytes = address(count), 24
					}
					n, ids, err := s.Save([]string{"mlp", "moe"}[g%2], []Storage{x})
					if err != nil {
						t.Error(err)
					}
					free(ids)
					mine = append(mine, n)
				}
				for g := groups - 1; g >= 0; g-- {
					_, ids, err := s.Load(mine[g])
					free(ids)
					if g%3 == 2 {
						_, e := s.Rows(1 + caller*groups + uint64(g))
						err = errors.Join(err, e)
					}
					_, e := s.Usage()
					_, f := s.Stats()
					err = errors.Join(err, e, f, s.SetLimit(6000))
					ids, e = s.Release(mine[g])
					free(ids)
					if err = errors.Join(err, e); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		ids, err := s.End(false)
		if free(ids); err != nil && !errors.As(err, new(*TooSmall)) {
			t.Fatal(err)
		}
		total := 0
		for _, n := range returned {
			total += n
		}
		if len(returned) != callers*groups || total != callers*groups+times {
			t.Errorf("step %d: %d storages were returned %d times; want %d and %d", step, len(returned), total, callers*groups, callers*groups+times)
		}
		for id, b := range provided {
			if !bytes.Equal(b, bytes.Repeat([]byte{byte(id)}, size)) {
				t.Errorf("step %d: storage %d came back changed", step, id)
			}
		}
		clear(provided)
		if err := s.Check(0); err != nil && !errors.As(err, new(*Overflow)) {
			t.Error(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// A trace may be switched while events come from other goroutines: each goes to one of the
// files, or to none. Run under the race detector, this test notices a missing lock.
func TestTraceSwitchedAtTheSameTime(t *testing.T) {
	var x switchedSink
	dir := t.TempDir()
	done := make(chan struct{})
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-done:
					return
				default:
					x.Emit(trace.Event{Kind: trace.Begin, Time: device.Now(), Step: i})
				}
			}
		})
	}
	var paths []string
	var files []*os.File
	for i := range 10 {
		paths = append(paths, filepath.Join(dir, fmt.Sprint(i)))
		f, err := os.Create(paths[i])
		files = append(files, f)
		if err == nil {
			err = x.switchTo(f, trace.Header{Rank: i})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := x.switchTo(nil, trace.Header{}); err != nil {
		t.Error(err)
	}
	close(done)
	wg.Wait()
	for i, path := range paths {
		if err := files[i].Close(); !errors.Is(err, os.ErrClosed) {
			t.Errorf("the file of trace %d was left open: %v", i, err)
		}
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		tr, err := trace.Read(f)
		if err != nil || tr.Cut != nil || tr.Header.Rank != i {
			t.Errorf("trace %d: %v, %+v", i, err, tr)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}
