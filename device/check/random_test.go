// This file owns the tests of the checker by random programs.

package check_test

import (
	"errors"
	"flag"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
)

var seedsFlag = flag.Int("seeds", 400, "random programs to run; CI runs 10000")

func seeds() int {
	if testing.Short() {
		return *seedsFlag / 4
	}
	return *seedsFlag
}

// SPEC S6.2: correct programs of 200 operations on four streams report nothing
// and give the sequential result, each under an order of its own.
func TestRandomPrograms(t *testing.T) {
	start := time.Now()
	for seed := range uint64(seeds()) {
		p := generate(seed, 200)
		c := check.New(check.Options{Schedule: &check.Schedule{Seed: seed}})
		if err := check.On(openCPU, on(p))(c); err != nil {
			t.Fatalf("seed %d: %v\n%v", seed, err, p)
		}
		if err := c.Err(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
	took := time.Since(start)
	t.Logf("%d seeds in %v: %v a seed", seeds(), took.Round(time.Millisecond), (took / time.Duration(seeds())).Round(time.Microsecond))
}

// Without a schedule the streams really run side by side.
func TestRandomProgramsSideBySide(t *testing.T) {
	for seed := range uint64(seeds() / 10) {
		p := generate(seed, 200)
		c := check.New(check.Options{})
		if err := check.On(openCPU, on(p))(c); err != nil {
			t.Fatalf("seed %d: %v\n%v", seed, err, p)
		}
	}
}

// judge runs a program under the race checker and compares the verdict with
// the oracle's.
func judge(t *testing.T, p program) (raced bool) {
	t.Helper()
	o := newOracle()
	for i, c := range p {
		o.step(i, c)
	}
	second, firsts := o.races()

	ck := check.New(check.Options{})
	err := check.On(openCPU, func(d device.Device) error {
		m, err := newMachine(d)
		if err != nil {
			return err
		}
		for i, c := range p {
			m.cap.step(i, c)
			if err := m.do(c); err != nil {
				return err
			}
		}
		if err := d.Sync(); err != nil {
			return err
		}
		return m.end()
	})(ck)
	if e := ck.Err(); e != nil {
		err = e // what the program saw after it means nothing
	}
	var race *check.Race
	switch {
	case o.bad && err == nil:
		t.Fatalf("a capture cannot succeed, but nothing was said\n%v", p)
	case o.bad: // there is no graph, so the rest means nothing
		return false
	case second == none && err != nil:
		t.Fatalf("the oracle sees no race, the checker says: %v\n%v", err, p)
	case second == none:
		return false
	case !errors.As(err, &race):
		t.Fatalf("call %d races with call %d; the checker says: %v\n%v", o.nodes[second].call, o.nodes[firsts[0]].call, err, p)
	}
	if got := p[o.nodes[second].call]; !named(race.Second, got) {
		t.Fatalf("call %d, %v, is the first to race; the checker names %v\n%v", o.nodes[second].call, got, race.Second, p)
	}
	for _, i := range firsts {
		if named(race.First, p[o.nodes[i].call]) {
			return true
		}
	}
	t.Fatalf("the checker says that %v races with %v, which it does not\n%v", race.Second, race.First, p)
	return true
}

// named reports whether a report's operation can be the call.
func named(o check.Operation, c call) bool {
	name := map[kind]string{
		doCopy: "copy", doCopy2D: "2-D copy", doFill: "fill", doMix: "kernel mix", doColumns: "kernel columns", doAdd: "kernel add",
		doHost: "host callback", doUpload: "upload", doDownload: "download", doView: "view",
	}[c.kind]
	if o.Name != name {
		return false
	}
	for _, u := range c.uses() {
		if o.Mode == u.mode && int(o.Bytes.Off) == u.off && int(o.Bytes.Len) == u.n && o.Bytes.Rows == u.rows {
			return true
		}
	}
	return c.slot != 0 // updated since
}

// SPEC S6.2: with an edge removed the checker agrees with the transitive
// closure on whether there is a race, and names a pair that is one.
func TestRemovedEdges(t *testing.T) {
	raced, total := 0, 0
	for seed := range uint64(seeds()) {
		rng := rand.New(rand.NewPCG(seed, 4))
		p := generate(seed, 60)
		var edges []int
		for i, c := range p {
			if c.kind >= doRecord && c.kind <= doPoll {
				edges = append(edges, i)
			}
		}
		if judge(t, p) {
			t.Fatalf("seed %d: a correct program races", seed)
		}
		for range 2 {
			total++
			if judge(t, p.without(edges[rng.IntN(len(edges))])) {
				raced++
			}
		}
	}
	t.Logf("%d of %d programs without one edge have a race", raced, total)
	if raced < total/4 {
		t.Errorf("only %d of %d programs without one edge have a race: the test has lost its teeth", raced, total)
	}
}

// decode makes a program, right or wrong, from bytes.
func decode(in []byte) (p program) {
	for ; len(in) >= 6 && len(p) < 60; in = in[6:] {
		c := call{stream: int(in[1]) % streams, event: int(in[2]) % events, value: in[3]}
		buf, off := int(in[4])%buffers, int(in[5])%120
		c.dst = rect{buf, off, 8, 8, 1}
		c.src = rect{(buf + 1) % buffers, (off * 3) % 120, 8, 8, 1}
		switch k := in[0] % 12; {
		case k < 3:
			c.kind = doRecord
		case k < 6:
			c.kind = doWait
		case k == 6:
			c.kind = doSyncStream
		case k == 7:
			c.kind, c.dst.pitch, c.dst.rows = doColumns, 16, 4
		case k == 8:
			c.kind, c.dst.off = doAdd, off/8*8
		case k == 9:
			c.kind = doMix
		case k == 10:
			c.kind, c.dst.buf = doView, firstHost+buf%2
		default:
			c.kind = doCopy
		}
		p = append(p, c)
	}
	return p
}

func FuzzChecker(f *testing.F) {
	rng := rand.New(rand.NewPCG(1, 1))
	for range 8 {
		b := make([]byte, 240)
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, in []byte) { judge(t, decode(in)) })
}
