// This file owns work of known duration and content. Benchmarks run it in place of a
// model.

package kernels

import (
	_ "embed"
	"encoding/binary"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

//go:embed wait_sm80.ptx
var waitPTX string

var (
	waitImage   = image("wait.cu", waitPTX)
	markKernel  = device.Kernel{Name: "stowage_mark", Image: waitImage, Go: markGo}
	waitKernel  = device.Kernel{Name: "stowage_wait", Image: waitImage, Go: waitGo}
	noiseKernel = device.Kernel{Name: "stowage_noise", Image: waitImage, Go: noiseGo}
)

const (
	// ClockBytes is the size of a clock. It holds two times: when the work on its
	// stream was due to begin or end, and when it did. It must be zero at first.
	ClockBytes = memory.Bytes(16)
	// A mark within waitSlack after a wait counts as following it directly. On an
	// idle stream the two are some microseconds apart.
	waitSlack = 100 * time.Microsecond
	// waitLate is the most lateness that the next piece makes up for. A sleep that
	// returned late is shorter; anything longer is a pause of the machine.
	waitLate = 2 * time.Millisecond
)

// MarkLaunch returns a launch that begins a piece of work of known duration.
// [WaitLaunch] ends the piece, and work issued between the two is part of it.
//
// A piece that directly follows another begins when that one was due to end. So a sleep
// that returned late makes one piece longer and the next ones shorter, and lateness does
// not add up. Any other piece begins now: time that the stream spent on something else
// is not made up for.
func MarkLaunch(clock device.Range) device.Launch { return clockLaunch(&markKernel, clock) }

// WaitLaunch returns a launch that ends a piece of work that began with [MarkLaunch]. It
// waits until d after the beginning, or not at all if the piece has taken longer already.
func WaitLaunch(clock device.Range, d time.Duration) device.Launch {
	l := clockLaunch(&waitKernel, clock)
	l.Arg(uint64(max(d, 0)))
	return l
}

func clockLaunch(k *device.Kernel, clock device.Range) device.Launch {
	mustAlign("a clock", clock, 8)
	mustHold("a clock", clock, ClockBytes)
	l := device.NewLaunch(k, 1, 32)
	l.Write(clock.Slice(0, ClockBytes))
	return l
}

// epoch is the monotonic time that the clocks of the CPU device count from. It lies far
// enough in the past that no piece seems to follow a clock of zeros.
var epoch = time.Now().Add(-time.Hour)

func now() uint64 { return uint64(time.Since(epoch)) }

func markGo(l *device.Launch) {
	clock, t := device.Slice[uint64](l.Args()[0], 2), now()
	due, seen := clock[0], clock[1]
	clock[0], clock[1] = t, t
	if t-seen < uint64(waitSlack) { // a time that is still to come is far off, too
		clock[0] = t - min(seen-due, uint64(waitLate))
	}
}

func waitGo(l *device.Launch) {
	clock, t := device.Slice[uint64](l.Args()[0], 2), now()
	ns := l.Args()[1]
	// The work began before now, so it ends within ns whatever the clock says.
	due := min(clock[0]+max(ns, t-clock[1]), t+ns)
	for ; t < due; t = now() {
		time.Sleep(time.Duration(due - t))
	}
	clock[0], clock[1] = due, t
}

// NoiseLaunch returns a launch that fills dst with the [Noise] of a seed and a salt. dst
// must begin at a multiple of 16 bytes. The kernel reads the seed from eight bytes of
// memory when it runs, so replays of a graph write other bytes after the seed changes.
func NoiseLaunch(dst, seed device.Range, salt uint64) device.Launch {
	mustAlign("noise", dst, 16)
	mustAlign("a seed", seed, 8)
	mustHold("a seed", seed, 8)
	l := device.NewLaunch(&noiseKernel, blocksFor(dst.Len, moveChunk, dst), moveThreads)
	l.Write(dst)
	l.Arg(uint64(dst.Len))
	l.Read(seed.Slice(0, 8))
	l.Arg(salt)
	return l
}

func noiseGo(l *device.Launch) {
	a := l.Args()
	Noise(device.Slice[byte](a[0], int(a[1])), device.Slice[uint64](a[2], 1)[0], a[3])
}

// Noise fills b with pseudo-random bytes that depend on the seed, the salt and the
// place. Word i of eight bytes, the least significant first, is
//
//	mix(mix(seed + salt golden) + (i+1) golden), modulo 2^64
//
// The last word is cut off at the end of b.
func Noise(b []byte, seed, salt uint64) {
	step := mix(seed + salt*golden)
	for ; len(b) >= 8; b = b[8:] {
		step += golden
		binary.LittleEndian.PutUint64(b, mix(step))
	}
	var last [8]byte
	binary.LittleEndian.PutUint64(last[:], mix(step+golden))
	copy(b, last[:])
}
