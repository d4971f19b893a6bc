// This file owns the tests of work of known duration and content.

package kernels

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"
	"unsafe"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// modelNoise computes the definition, byte by byte.
func modelNoise(n int, seed, salt uint64) []byte {
	mix := func(x uint64) uint64 {
		x = (x ^ x/(1<<30)) * 13787848793156543929
		x = (x ^ x/(1<<27)) * 10723151780598845931
		return x ^ x/(1<<31)
	}
	base := mix(seed + salt*11400714819323198485)
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(mix(base+uint64(i/8+1)*11400714819323198485) >> (8 * (i % 8)))
	}
	return b
}

// Go and the device write the same bytes for every grid, and none around them. The seed is
// the one in memory when the kernel runs.
func TestNoise(t *testing.T) {
	each(t, func(t *testing.T, x *lab) {
		seed := x.buf[memory.Device][1]
		rapid.Check(t, func(t *rapid.T) {
			dst := x.buf[rapid.IntRange(0, 1).Draw(t, "kind")][0]
			n, at := length(70000).Draw(t, "length"), 16*start().Draw(t, "start")
			s, salt := rapid.Uint64().Draw(t, "seed"), rapid.Uint64().Draw(t, "salt")
			want := noise(room, 20)
			x.Upload(dst.All(), want)
			l := NoiseLaunch(dst.Slice(memory.Bytes(at), memory.Bytes(n)), seed.Slice(8, 8), salt)
			grid(t, &l)
			x.Upload(seed.Slice(8, 8), binary.LittleEndian.AppendUint64(nil, s))
			x.Launch(l)
			copy(want[at:], modelNoise(n, s, salt))
			x.want(t, dst, want)
		})
	})
}

// Other seeds, salts and places give other words.
func TestNoiseDiffers(t *testing.T) {
	seen := map[uint64]bool{}
	var b [64]byte
	for seed := range uint64(20) {
		for salt := range uint64(20) {
			Noise(b[:], seed, salt)
			for i := 0; i < len(b); i += 8 {
				w := binary.LittleEndian.Uint64(b[i:])
				if seen[w] {
					t.Fatalf("word %d of seed %d and salt %d was there before", i/8, seed, salt)
				}
				seen[w] = true
			}
		}
	}
}

// A captured noise follows the seed from replay to replay.
func TestNoiseInAGraph(t *testing.T) {
	each(t, func(t *testing.T, x *lab) {
		dst, seed := x.buf[memory.Device][0].Slice(0, 1000), x.buf[memory.Device][1].Slice(0, 8)
		x.Stream.Launch(NoiseLaunch(dst, seed, 1)) // loads the code
		x.BeginCapture()
		x.Launch(NoiseLaunch(dst, seed, 1))
		g, err := x.EndCapture()
		if err != nil {
			t.Fatal(err)
		}
		for s := range uint64(3) {
			x.Upload(seed, binary.LittleEndian.AppendUint64(nil, s))
			x.Replay(g)
			got := make([]byte, dst.Len)
			if err := x.Download(got, dst); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, modelNoise(len(got), s, 1)) {
				t.Errorf("the replay with seed %d wrote something else", s)
			}
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
}

// A piece lasts as long as requested, including the work between mark and wait. Several in
// a row last at least their sum.
func TestWaitLasts(t *testing.T) {
	each(t, func(t *testing.T, x *lab) {
		clock := x.buf[memory.Device][0].Slice(0, ClockBytes)
		x.Fill(clock, 0)
		x.Launch(MarkLaunch(clock)) // loads the code
		x.Launch(WaitLaunch(clock, 0))
		if err := x.Stream.Sync(); err != nil {
			t.Fatal(err)
		}
		const pieces, each = 5, 4 * time.Millisecond
		time.Sleep(time.Millisecond) // far beyond the slack
		from := time.Now()
		for range pieces {
			x.Launch(MarkLaunch(clock))
			Fill(x.Stream, x.buf[memory.Device][1].All(), 3)
			x.Launch(WaitLaunch(clock, each))
		}
		if err := x.Stream.Sync(); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(from); took < pieces*each || took > time.Minute {
			t.Errorf("%d pieces of %v took %v", pieces, each, took)
		}
	})
}

// clocked runs a launch of the twin on a clock with the given words.
func clocked(t *testing.T, launch func(device.Range) device.Launch, due, seen uint64) (after [2]uint64) {
	b := make([]byte, ClockBytes)
	binary.LittleEndian.PutUint64(b, due)
	binary.LittleEndian.PutUint64(b[8:], seen)
	run(launch(rangeOf(t, b, 0, int(ClockBytes))))
	return [2]uint64{binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])}
}

// The next piece makes up for a wait that returned late if it follows at once, as far as
// sleeps are late. Time that the stream spent on something else is not made up for.
func TestMarkMakesUpForLateness(t *testing.T) {
	const late = uint64(time.Millisecond)
	for _, was := range []uint64{0, late, 100 * late} {
		soon := false
		for range 100 { // the machine may pause between the two readings of the clock
			seen := now()
			after := clocked(t, MarkLaunch, seen-was, seen)
			if soon = after[1]-after[0] == min(was, uint64(waitLate)) && after[1] >= seen; soon {
				break
			}
		}
		if !soon {
			t.Errorf("lateness of %d is not made up for", was)
		}
	}
	seen := now() - uint64(waitSlack)
	if after := clocked(t, MarkLaunch, seen-late, seen); after[0] != after[1] || after[1] < seen+uint64(waitSlack) {
		t.Errorf("a mark long after a wait gives %d, at %d", after[0], after[1])
	}
}

// The source and the twin agree on which marks follow a wait.
func TestSlackIsOne(t *testing.T) {
	src, err := os.ReadFile("wait.cu")
	if err != nil {
		t.Fatal(err)
	}
	for name, d := range map[string]time.Duration{"SLACK": waitSlack, "LATE": waitLate} {
		if want := fmt.Sprintf("#define %s %d ", name, d.Nanoseconds()); !bytes.Contains(src, []byte(want)) {
			t.Errorf("wait.cu has no %q", want)
		}
	}
}

// A wait ends when it is due by its own clock, however late it returns. A piece that takes
// longer by itself is due when it is done. Earlier lateness remains, to be made up for
// later.
func TestWaitTwin(t *testing.T) {
	wait := func(d time.Duration) func(device.Range) device.Launch {
		return func(c device.Range) device.Launch { return WaitLaunch(c, d) }
	}
	const piece = uint64(3 * time.Millisecond)
	began := now()
	after := clocked(t, wait(time.Duration(piece)), began, began)
	for tries := 0; after[0] > began+piece && tries < 100; tries++ { // the machine paused for longer than that
		began = now()
		after = clocked(t, wait(time.Duration(piece)), began, began)
	}
	if after[0] != began+piece || after[1] < after[0] {
		t.Errorf("due at %d and over at %d, having begun at %d", after[0], after[1], began)
	}
	const late, took = uint64(5 * time.Millisecond), uint64(time.Millisecond)
	began = now() - took
	if after = clocked(t, wait(time.Microsecond), began-late, began); after[1]-after[0] != late {
		t.Errorf("a piece that took %d was due at %d and over at %d, %d late before it", took, after[0], after[1], late)
	}
	const long = time.Minute // so that no pause of the machine is longer
	began = now()
	if after = clocked(t, wait(long), began-uint64(2*long), began); after[0] != began-uint64(long) || after[1] > began+uint64(long) {
		t.Errorf("a piece that makes up for lateness was due at %d and over at %d, having begun at %d", after[0], after[1], began)
	}
}

func BenchmarkNoise(b *testing.B) {
	data := make([]byte, memory.MiB)
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		Noise(data, 1, 2)
	}
}

// A wait ends in time whatever the clock says, and says when it was due.
func TestWaitOfAWrongClock(t *testing.T) {
	clock := make([]uint64, 2)
	r := rangeOf(t, unsafe.Slice((*byte)(unsafe.Pointer(&clock[0])), 16), 0, 16)
	for _, ahead := range []time.Duration{0, time.Minute} {
		from := now()
		clock[0], clock[1] = from+uint64(ahead), from
		run(WaitLaunch(r, 1000))
		if to := now(); clock[0] > to || clock[0] < from+1000 || clock[1] < clock[0] || clock[1] > to {
			t.Errorf("%v ahead: due at %d and over at %d, %d to %d", ahead, clock[0], clock[1], from, to)
		}
	}
}

// The copy of a graph goes the way of a copy.
func TestGraphCopy(t *testing.T) {
	a := device.NewBuffer(memory.Device, 1<<20, room, room, "a")
	b := device.NewBuffer(memory.Device, 1<<30, room, room, "b")
	want := CopyLaunch(a.Slice(64, 100), b.Slice(32, 100))
	l, ok := GraphCopy(a.Slice(64, 100), b.Slice(32, 100))
	if !ok || !slices.Equal(l.Args(), want.Args()) || !slices.Equal(slices.Collect(l.Accesses), slices.Collect(want.Accesses)) {
		t.Errorf("%v, %t; want %v", l.Args(), ok, want.Args())
	}
}
