// This file owns the tests of kernel launches.

package devicetest

import (
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

var launchCases = []testCase{
	{name: "Arguments", fn: testLaunchArguments},
	{name: "ManyDeclarations", fn: testManyDeclarations},
	{name: "ValueSemantics", fn: testLaunchIsAValue},
	{name: "MoreThanTheQueueHolds", fn: testLongQueue},
}

var launchAllocCases = []testCase{
	{name: "AllocatesNothing", fn: testLaunchAllocs},
}

// testLaunchArguments: pointers and numbers arrive in order, for grids of one
// block and of many, in memory of both kinds.
func testLaunchArguments(e *env) {
	s := e.stream("s")
	for _, words := range []int{1, 5, mixThreads, mixThreads + 1, 10_000} {
		eachWay(func(dk, sk memory.Kind) {
			n := 8 * words
			dst, src := e.allocWith(s, dk, pattern(1, n+24)), e.allocWith(s, sk, pattern(2, n+16))
			want := pattern(1, n+24)
			for _, add := range []uint64{0, 1, 1 << 63, ^uint64(0)} {
				s.Launch(mix(dst.Slice(8, memory.Bytes(n)), src.Slice(16, memory.Bytes(n)), add))
				mixBytes(want[8:n+8], pattern(2, n+16)[16:], add)
			}
			e.want(s, dst.All(), want, "%d words of %v and %v memory", words, dk, sk)
			s.Free(dst)
			s.Free(src)
		})
	}
}

// testManyDeclarations: bytes that a kernel reaches without an argument of
// their own may be declared by the hundred.
func testManyDeclarations(e *env) {
	s := e.stream("s")
	x, y := e.allocWith(s, memory.Device, pattern(1, 4096)), e.allocWith(s, memory.Device, pattern(2, 4096))
	more := e.alloc(memory.Host, 40_000)
	var table []device.Access
	for i := range memory.Bytes(200) {
		table = append(table, device.Reads(more.Slice(i*200, 100)))
	}
	table = append(table, device.Access{Rect: rectOf(more, 100, 100, 200, 199), Mode: device.Atomic})
	want := pattern(1, 4096)
	for i := range 10 {
		l := mix(x.All(), y.All(), uint64(i))
		for j := range memory.Bytes(i) {
			l.Declare(device.Atomics(more.Slice(100+j*200, 50)))
		}
		l.DeclareAll(table)
		s.Launch(l)
		mixBytes(want, pattern(2, 4096), uint64(i))
	}
	e.want(s, x.All(), want, "with many declarations")
	l := mix(x.All(), y.All(), 0)
	l.DeclareAll([]device.Access{device.Reads(more.All()), device.Reads(device.Range{Buf: more, Off: 1, Len: 40_000})})
	e.panics("a launch with a bad declaration among many", "outside of", func() { s.Launch(l) })
}

// testLaunchIsAValue: changing a launch after it was issued changes nothing.
func testLaunchIsAValue(e *env) {
	s := e.stream("s")
	x, y := e.allocWith(s, memory.Device, pattern(1, 1024)), e.allocWith(s, memory.Device, pattern(2, 1024))
	e.loadKernel(s)
	want := pattern(1, 1024)
	g := e.gate(s)
	l := mix(x.All(), y.All(), 1)
	s.Launch(l)
	clear(l.Args())
	s.Launch(mix(x.All(), y.All(), 2))
	g.release()
	mixBytes(want, pattern(2, 1024), 1)
	mixBytes(want, pattern(2, 1024), 2)
	e.want(s, x.All(), want, "a launch changed after it was issued")
}

// testLongQueue issues more than any queue holds at once: the host may have to
// wait for room, but nothing is lost.
func testLongQueue(e *env) {
	s := e.stream("s")
	x, y := e.allocWith(s, memory.Device, pattern(1, 64)), e.allocWith(s, memory.Device, pattern(2, 64))
	want := pattern(1, 64)
	for i := range 5000 {
		s.Launch(mix(x.All(), y.All(), uint64(i)))
		mixBytes(want, pattern(2, 64), uint64(i))
	}
	e.want(s, x.All(), want, "after five thousand launches")
}

// testLaunchAllocs: on the hot path a launch leaves the Go heap alone, with
// prepared declarations too.
func testLaunchAllocs(e *env) {
	s := e.stream("s")
	x, y := e.allocWith(s, memory.Device, pattern(1, 1024)), e.allocWith(s, memory.Device, pattern(2, 1024))
	table := make([]device.Access, 50)
	for i := range table {
		table[i] = device.Reads(y.Slice(memory.Bytes(i), 1))
	}
	launch := func() {
		l := mix(x.All(), y.All(), 1)
		l.DeclareAll(table)
		s.Launch(l)
	}
	const runs = 200
	for range 5 * runs { // queues have grown to what they need
		launch()
	}
	e.sync(s)
	if n := testing.AllocsPerRun(runs, launch); n != 0 {
		e.Errorf("a launch makes %v allocations", n)
	}
}
