// This file owns the tests of events outside of graphs.

package devicetest

import (
	"slices"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

var eventCases = []testCase{
	{name: "AcrossStreams", fn: testEventAcrossStreams},
	{name: "NeverRecorded", fn: testEventNeverRecorded},
	{name: "LatestRecordingCounts", fn: testLatestRecording},
	{name: "LaterRecordingDoesNotCount", fn: testLaterRecording},
	{name: "OneForManyWaiters", fn: testManyWaiters},
	{name: "OnItsOwnStream", fn: testWaitOnOwnStream},
	{name: "ClosedBeforeItIsReached", fn: testEventClosedEarly},
	{name: "Done", fn: testEventDone},
	{name: "DoneMakesProgress", fn: testDoneMakesProgress},
	{name: "Sync", fn: testEventSync},
	{name: "PingPong", fn: testPingPong},
	{name: "Timing", fn: testTiming},
	{name: "SinceRefuses", fn: testSinceRefuses},
	{name: "ClosedThingsPanic", fn: testClosedThings},
}

// testEventAcrossStreams hands a buffer along three streams, twice around.
func testEventAcrossStreams(e *env) {
	a, b, c := e.threeStreams()
	const n = 8192
	x, y := e.allocWith(a, memory.Device, pattern(1, n)), e.allocWith(a, memory.Device, pattern(2, n))
	want := pattern(1, n)
	e.loadKernel(a)
	g := e.gate(a)
	streams := []device.Stream{a, b, c}
	for i := range 2 * len(streams) {
		s, next := streams[i%3], streams[(i+1)%3]
		s.Launch(mix(x.All(), y.All(), uint64(i)))
		mixBytes(want, pattern(2, n), uint64(i))
		e.order(s, next)
	}
	time.Sleep(blink)
	g.release()
	e.sync(b, c)
	e.want(a, x.All(), want, "handed around")
}

// testEventNeverRecorded: it holds nothing back, is done, and waiting for it
// returns at once.
func testEventNeverRecorded(e *env) {
	for _, flags := range []device.EventFlags{0, device.Timing, device.External} {
		s, ev := e.stream("s"), e.event(flags)
		x := e.alloc(memory.Device, 100)
		if !ev.Done() {
			e.Errorf("an event of flags %d that was never recorded is not done", flags)
		}
		e.within("Sync of an event never recorded", ev.Sync)
		s.Wait(ev)
		s.Fill(x.All(), 1)
		e.want(s, x.All(), filled(1, 100), "behind a wait for nothing")
	}
}

// testLatestRecording: a wait takes the last of several recordings.
func testLatestRecording(e *env) {
	a, b, _ := e.threeStreams()
	x, y, ev := e.allocWith(a, memory.Device, filled(1, 4096)), e.alloc(memory.Device, 4096), e.event(0)
	a.Record(ev)
	e.sync(a)
	g := e.gate(a)
	a.Fill(x.All(), 2)
	a.Record(ev)
	b.Wait(ev)
	b.Copy(y.All(), x.All())
	time.Sleep(blink)
	g.release()
	e.want(b, y.All(), filled(2, 4096), "read behind the second recording")
}

// testLaterRecording: what is recorded after the wait was issued does not
// count. If it did, each of the two streams would wait for the other.
func testLaterRecording(e *env) {
	a, b, _ := e.threeStreams()
	x, y := e.alloc(memory.Device, 4096), e.alloc(memory.Device, 4*4096)
	there, back := e.event(0), e.event(0)
	g := e.gate(a)
	for i := range 4 {
		a.Fill(x.All(), byte(i+1))
		a.Record(there)
		b.Wait(there)
		b.Copy(y.Slice(memory.Bytes(i)*4096, 4096), x.All())
		b.Record(back)
		a.Wait(back)
	}
	a.Record(there)
	g.release()
	e.sync(a)
	var want []byte
	for i := range 4 {
		want = append(want, filled(byte(i+1), 4096)...)
	}
	e.want(b, y.All(), want, "two events recorded again and again")
}

// testManyWaiters: one recording releases all who wait for it.
func testManyWaiters(e *env) {
	a := e.stream("a")
	x, y, ev := e.allocWith(a, memory.Device, filled(1, 1024)), e.alloc(memory.Host, 5*1024), e.event(0)
	g := e.gate(a)
	a.Fill(x.All(), 2)
	a.Record(ev)
	var waiters []device.Stream
	for i := range memory.Bytes(5) {
		s := e.stream("waiter")
		waiters = append(waiters, s)
		s.Wait(ev)
		s.Wait(ev)
		s.Copy(y.Slice(i*1024, 1024), x.All())
	}
	time.Sleep(blink)
	g.release()
	e.sync(waiters...)
	e.want(a, y.All(), filled(2, 5*1024), "copied by five streams")
}

func testWaitOnOwnStream(e *env) {
	s, ev, x := e.stream("s"), e.event(0), e.alloc(memory.Device, 100)
	s.Fill(x.All(), 1)
	s.Record(ev)
	s.Wait(ev)
	s.Fill(x.Slice(0, 50), 2)
	s.Record(ev)
	s.Wait(ev)
	e.want(s, x.All(), slices.Concat(filled(2, 50), filled(1, 50)), "behind waits for itself")
}

// testEventClosedEarly: a wait that was issued outlives its event.
func testEventClosedEarly(e *env) {
	a, b, _ := e.threeStreams()
	x, y := e.allocWith(a, memory.Device, filled(1, 4096)), e.alloc(memory.Device, 4096)
	ev, err := e.dev.NewEvent(0)
	e.ok(err)
	g := e.gate(a)
	a.Fill(x.All(), 2)
	a.Record(ev)
	b.Wait(ev)
	e.ok(ev.Close())
	b.Copy(y.All(), x.All())
	time.Sleep(blink)
	g.release()
	e.sync(a)
	e.want(b, y.All(), filled(2, 4096), "behind an event that was closed")
}

// testEventDone: Done follows the last recording and never waits.
func testEventDone(e *env) {
	s, ev := e.stream("s"), e.event(0)
	for range 3 {
		g := e.gate(s)
		s.Record(ev)
		if ev.Done() {
			e.Error("an event is done while the work before it is held back")
		}
		g.release()
		e.sync(s)
		if !ev.Done() {
			e.Error("an event is not done after its stream is")
		}
	}
}

// testDoneMakesProgress: asking often enough is enough, without any Sync.
func testDoneMakesProgress(e *env) {
	a, b, _ := e.threeStreams()
	x, ev := e.alloc(memory.Device, 4096), e.event(0)
	for i := range 20 {
		a.Fill(x.All(), byte(i))
		e.order(a, b)
		b.Fill(x.Slice(0, 2048), byte(i+1))
		e.order(b, a)
	}
	a.Record(ev)
	for start := time.Now(); !ev.Done(); time.Sleep(20 * time.Microsecond) {
		if time.Since(start) > e.patience.call {
			e.stuck.Store(true)
			e.Fatalf("Done was false for %v", e.patience.call)
		}
	}
	e.want(a, x.All(), slices.Concat(filled(20, 2048), filled(19, 2048)), "after Done said so")
}

// testEventSync waits for the work marked last, and for no more than that.
func testEventSync(e *env) {
	s, ev := e.stream("s"), e.event(0)
	h, x := e.alloc(memory.Host, 4096), e.alloc(memory.Device, 4096)
	for i := range 3 {
		s.Fill(x.All(), byte(i))
		s.Copy(h.All(), x.All())
		s.Record(ev)
		e.within("Event.Sync", ev.Sync)
		if diff := firstDifference(e.dev.View(h.All(), device.Read), filled(byte(i), 4096)); diff != "" {
			e.Errorf("round %d: after Event.Sync: %s", i, diff)
		}
	}
}

// testPingPong passes a buffer to and fro with the same two events, the work
// of many rounds being issued ahead.
func testPingPong(e *env) {
	a, b, _ := e.threeStreams()
	const n = 2048
	x, y := e.allocWith(a, memory.Device, pattern(1, n)), e.allocWith(a, memory.Host, pattern(2, n))
	there, back := e.event(0), e.event(0)
	wx, wy := pattern(1, n), pattern(2, n)
	for i := range 100 {
		a.Launch(mix(x.All(), y.All(), uint64(i)))
		a.Record(there)
		b.Wait(there)
		b.Copy(y.All(), x.All())
		b.Record(back)
		a.Wait(back)
		mixBytes(wx, wy, uint64(i))
		copy(wy, wx)
	}
	e.want(a, y.All(), wy, "after a hundred rounds")
}

// testTiming: time goes forward, and a pause of known length is not missed.
func testTiming(e *env) {
	s := e.stream("s")
	marks := []device.Event{e.event(device.Timing), e.event(device.Timing), e.event(device.Timing | device.External)}
	x := e.alloc(memory.Device, 4096)
	const pause = 3 * time.Millisecond
	const clock = 10 * time.Microsecond // the resolution of the coarsest clock, with room
	for range 2 {                       // recorded again, an event holds the new time
		start := time.Now()
		s.Record(marks[0])
		s.Fill(x.All(), 1)
		s.Record(marks[1])
		s.Host(func() { time.Sleep(pause) })
		s.Record(marks[2])
		e.sync(s)
		all := time.Since(start)
		short, err := marks[1].Since(marks[0])
		e.ok(err)
		rest, err := marks[2].Since(marks[1])
		e.ok(err)
		whole, err := marks[2].Since(marks[0])
		e.ok(err)
		if short < 0 || rest < pause-pause/10 || whole < rest-clock {
			e.Errorf("two steps with a pause of %v in the second took %v and %v, %v together", pause, short, rest, whole)
		}
		if diff := whole - short - rest; diff.Abs() > clock || whole > all+time.Millisecond {
			e.Errorf("%v and %v make %v, of which the host saw %v", short, rest, whole, all)
		}
		if zero, err := marks[0].Since(marks[0]); err != nil || zero != 0 {
			e.Errorf("from an event to itself it is %v, %v", zero, err)
		}
	}
}

// testSinceRefuses: there is no time between events not recorded or not done.
func testSinceRefuses(e *env) {
	s, a, b := e.stream("s"), e.event(device.Timing), e.event(device.Timing)
	if d, err := b.Since(a); err == nil {
		e.Errorf("between two events never recorded there is %v", d)
	}
	s.Record(a)
	e.sync(s)
	if d, err := b.Since(a); err == nil {
		e.Errorf("to an event never recorded there is %v", d)
	}
	g := e.gate(s)
	s.Record(b)
	if d, err := b.Since(a); err == nil {
		e.Errorf("to an event not done there is %v", d)
	}
	g.release()
	e.sync(s)
	if _, err := b.Since(a); err != nil {
		e.Errorf("after a refusal: %v", err)
	}
	plain := e.event(0)
	s.Record(plain)
	e.sync(s)
	e.panics("Since of an event without Timing", "Timing", func() { _, _ = plain.Since(a) })
	e.panics("Since an event without Timing", "Timing", func() { _, _ = b.Since(plain) })
}

// testClosedThings: streams and events that were closed are not used again.
func testClosedThings(e *env) {
	s, gone, x := e.stream("s"), e.stream("gone"), e.alloc(memory.Device, 100)
	e.closeStream(gone)
	e.panics("a fill on a closed stream", "closed", func() { gone.Fill(x.All(), 1) })
	e.panics("a callback on a closed stream", "closed", func() { gone.Host(func() {}) })
	ev, err := e.dev.NewEvent(0)
	e.ok(err)
	s.Record(ev)
	e.ok(ev.Close())
	e.panics("recording a closed event", "closed", func() { s.Record(ev) })
	e.panics("waiting for a closed event", "closed", func() { s.Wait(ev) })
	s.Fill(x.All(), 2)
	e.want(s, x.All(), filled(2, 100), "after misuse")
}
