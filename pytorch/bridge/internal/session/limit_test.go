// This file owns the tests of the saved limit: changes of it, and what is held under it.

package session

import (
	"errors"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
)

// SPEC S8.1: a caller that learns during a step what else its device holds lowers or
// raises the saved limit. The plan of the step keeps to the limit that was set last, and
// one that no plan keeps to is an error that names the least.
func TestLimit(t *testing.T) {
	const layers, size = 6, 4096
	provided := map[uint64][]byte{}
	s := opened(t, `{"device": "cpu", "saved_limit": 1000000}`, func(id, n uint64) uint64 {
		provided[id] = aligned(t, int(n))
		return address(provided[id])
	})
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	usage := func() Usage {
		t.Helper()
		u, err := s.Usage()
		must(err)
		return u
	}
	// step saves and loads layers and returns the most that was held of them, after the
	// limit was changed early.
	step := func(early, inside memory.Bytes) (most memory.Bytes, recorded bool, err error) {
		t.Helper()
		if err := s.Begin("k", 0); err != nil {
			return 0, false, err
		}
		recorded = usage().Recording
		for i := range uint64(layers) {
			b := aligned(t, size)
			_, _, err := s.Save("mlp", []Storage{{ID: i + 1, Address: address(b), Bytes: size}})
			must(err)
			most = max(most, usage().Saved)
			if i == 2 && early > 0 {
				must(s.SetLimit(early))
				most = 0
			}
		}
		for i := range uint64(layers) {
			_, _, err := s.Load(layers - i)
			must(err)
			most = max(most, usage().Saved)
			_, err = s.Release(layers - i)
			must(err)
		}
		if u := usage(); u.Saved != 0 {
			t.Errorf("%v are held after all was released", u.Saved)
		}
		if inside > 0 {
			must(s.SetLimit(inside))
		}
		_, err = s.End(false)
		return most, recorded, err
	}
	for i, x := range []struct {
		limit, early, inside, most memory.Bytes
		recorded                   bool
	}{
		{100, 2, 3, 2, true}, // the plan is made for three
		{3, 0, 0, 3, false},
		{5, 0, 0, 5, false},
		{100, 0, 0, layers, false},
		{1, 0, 0, 1, false},
	} {
		must(s.SetLimit(x.limit * size))
		most, recorded, err := step(x.early*size, x.inside*size)
		must(err)
		if most > x.most*size || recorded != x.recorded {
			t.Errorf("step %d under a limit of %d layers held %v; recorded: %v", i, x.limit, most, recorded)
		}
	}
	must(s.SetLimit(size / 2))
	_, _, err := step(0, 0)
	var small *TooSmall
	if !errors.As(err, &small) || small.Least != size || usage().Least != size || !strings.Contains(err.Error(), "4096 bytes") {
		t.Errorf("a limit below the least: %v, %+v", err, usage())
	}
	must(s.SetLimit(2 * size))
	if most, _, err := step(0, 0); err != nil || most > 2*size || usage().Limit != 2*size {
		t.Errorf("after that: %v, %v", most, err)
	}
	if err := s.SetLimit(0); !errors.As(err, new(Wrong)) {
		t.Error(err)
	}
	if err := opened(t, `{"device": "cpu"}`, nil).SetLimit(5); !errors.As(err, new(Wrong)) || !strings.Contains(err.Error(), "saved_limit") {
		t.Error(err)
	}
}

// Rows that are in place only until they are counted are told apart from other memory.
func TestUsageOfRows(t *testing.T) {
	s := opened(t, `{"device": "cpu", "saved_limit": 1000000}`, nil)
	for i, waiting := range []memory.Bytes{96, 0, 0} {
		if err := s.Begin("k", 0); err != nil {
			t.Fatal(err)
		}
		b, c := aligned(t, 64), aligned(t, 64)
		clear(b)
		clear(c)
		for id, m := range [][]byte{b, c} {
			if _, _, err := s.Save("moe", []Storage{{ID: uint64(id) + 1, Address: address(m), Bytes: 48, Rows: address(m) + 48, RowBytes: 24}}); err != nil {
				t.Fatal(err)
			}
		}
		if u, err := s.Usage(); err != nil || u.Rows != waiting || u.Saved != 0 {
			t.Errorf("step %d: %+v, %v", i, u, err)
		}
		if _, err := s.Release(1); err != nil {
			t.Fatal(err)
		}
		if u, err := s.Usage(); err != nil || u.Rows != waiting/2 {
			t.Errorf("step %d: %+v, %v after one of two was released", i, u, err)
		}
		if _, err := s.End(false); err != nil {
			t.Fatal(err)
		}
		if err := s.Check(0); err != nil {
			t.Fatal(err)
		}
		if u, _ := s.Usage(); u.Rows != 0 || u.Own == 0 {
			t.Errorf("after step %d: %+v", i, u)
		}
	}
}

// What the session holds is what it holds now, not the most that it ever held.
func TestUsageIsOfNow(t *testing.T) {
	c := newStreamer(t, Config{Limit: 10000})
	c.step("k", 0, 1, false)
	x := c.s.streams[0]
	b, err := c.dev.Alloc(memory.Device, memory.MiB, "for a while")
	c.ok(err)
	x.Free(b)
	c.ok(c.dev.Sync())
	m := c.dev.Memory().Kind[memory.Device]
	if u, err := c.s.Usage(); err != nil || u.Own != m.Current || m.Current >= m.Peak {
		t.Errorf("%v of at most %v are held, and told are %v: %v", m.Current, m.Peak, u.Own, err)
	}
	c.close()
}

// Only a positive limit can be set, and only in place of another.
func TestSetLimitRefused(t *testing.T) {
	with, without := opened(t, `{"device": "cpu", "saved_limit": 1000}`, nil), opened(t, `{"device": "cpu"}`, nil)
	for _, x := range []struct {
		s     *Session
		limit memory.Bytes
		words string
	}{{with, 0, "expected a positive limit"}, {with, -1, "expected a positive limit"}, {without, 5, "opened without saved_limit"}} {
		if err := x.s.SetLimit(x.limit); !errors.As(err, new(Wrong)) || !strings.Contains(err.Error(), x.words) {
			t.Errorf("a limit of %d: %v, want %q", x.limit, err, x.words)
		}
	}
	if err := with.SetLimit(1); err != nil {
		t.Error(err)
	}
	for s, want := range map[*Session]memory.Bytes{with: 1, without: 0} {
		if u, err := s.Usage(); u.Limit != want || err != nil {
			t.Errorf("the limit is %d, want %d: %v", u.Limit, want, err)
		}
	}
}
