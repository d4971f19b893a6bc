// This file owns work of known duration and content, which benchmarks run in place
// of a model.

package kernels

import (
	_ "embed"
	"encoding/binary"
	"time"

	"github.com/stowage-dev/stowage/device"
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
	// ClockBytes is the memory of a clock: when the work on its stream was due to
	// begin or end, and when it did. It begins as zeros.
	ClockBytes = device.Bytes(16)
	// waitSlack is how long after the end of a wait a mark still takes the two for
	// neighbours; on an idle stream they are some microseconds apart.
	waitSlack = 100 * time.Microsecond
	// waitLate is the most lateness that is made up for: what is more than a sleep
	// that returned late is a pause of the machine.
	waitLate = 2 * time.Millisecond
)

// MarkLaunch begins a piece of work of known duration: [WaitLaunch] ends it. What
// is issued between the two is part of it.
//
// The piece begins now, or, right after the wait of the piece before, when that
// was due to end: a sleep that returned late makes one piece longer and the next
// ones shorter, so that lateness does not add up. A stream that was held up by
// something else in between is not given that time back.
func MarkLaunch(clock device.Range) device.Launch { return clockLaunch(&markKernel, clock) }

// WaitLaunch ends a piece of work that began with [MarkLaunch]: it lasts until so
// long after the beginning, or no time at all if what lies between took longer.
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

// epoch is what the clocks of the CPU device count from, monotonically. It lies far
// enough back that a clock of zeros is never a neighbour of now.
var epoch = time.Now().Add(-time.Hour)

func now() uint64 { return uint64(time.Since(epoch)) }

func markGo(l *device.Launch) {
	clock, t := device.Slice[uint64](l.Args()[0], 2), now()
	due, seen := clock[0], clock[1]
	clock[0], clock[1] = t, t
	if t >= seen && t-seen < uint64(waitSlack) {
		clock[0] = t - min(seen-due, uint64(waitLate))
	}
}

func waitGo(l *device.Launch) {
	clock, t := device.Slice[uint64](l.Args()[0], 2), now()
	ns := l.Args()[1]
	// The work began before now: whatever the clock says, it ends within ns.
	due := min(clock[0]+max(ns, t-clock[1]), t+ns)
	for ; t < due; t = now() {
		time.Sleep(time.Duration(due - t))
	}
	clock[0], clock[1] = due, t
}

// NoiseLaunch fills dst, which begins at a multiple of 16 bytes, with the [Noise]
// of a seed, which is read from eight bytes of memory when the kernel runs, and a
// salt: replays of a graph write other bytes once somebody has changed the seed.
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

// Noise fills b with bytes that no other seed, salt or place has but by chance:
// word i of eight bytes, the least significant first, is
//
//	mix(mix(seed + salt golden) + (i+1) golden), modulo 2^64
//
// and the last word is cut off where b ends.
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
