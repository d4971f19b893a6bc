// This file owns the proof that the measured stash is right: every group is restored as it
// was given, the store reports no problem, and launches are counted, not assumed.

package bench

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// period is the length after which the random bytes repeat. It is odd, so no two pages of a
// tensor are equal until there are this many pages.
const period = 256*memory.KiB - 1

// randomise fills a range with random bytes: a few of them, and copies of those.
func randomise(s device.Stream, dst device.Range, seed uint64) {
	raw := make([]byte, period+7)
	rng := rand.New(rand.NewPCG(1, seed))
	for i := 0; i+8 <= len(raw); i += 8 {
		binary.LittleEndian.PutUint64(raw[i:], rng.Uint64())
	}
	first := min(memory.Bytes(period), dst.Len)
	s.Upload(dst.Slice(0, first), raw[:first])
	for n := first; n < dst.Len; n *= 2 {
		more := min(n, dst.Len-n)
		s.Copy(dst.Slice(n, more), dst.Slice(0, more))
	}
}

// sums returns the size of all checksums: two for each tensor of each group, as given and
// as found, and two for the whole set, before and after the measurement.
func (o StashOptions) sums() memory.Bytes { return memory.Bytes(16 * (o.Groups*o.Tensors + 1)) }

// sum returns the place of a checksum. The set counts as the tensor behind the last.
func (r *stashRig) sum(tensor int, found bool) device.Range {
	at := 2 * tensor
	if found {
		at++
	}
	return r.sums.Slice(memory.Bytes(8*at), 8)
}

// live returns the live rows of tensor k of group i, in the set.
func (r *stashRig) live(o StashOptions, i, k int) device.Range {
	return r.layoutOf(i).Tensor(r.set.All(), k).Slice(0, o.bytes(i)/memory.Bytes(o.Tensors))
}

// launched returns the number of launches that a function issues.
func (r *stashRig) launched(issue func()) int {
	before := r.dev.Counters().Launches
	issue()
	return int(r.dev.Counters().Launches - before)
}

// stashAll stashes every group once, with random bytes of its own from the plain buffer.
func (r *stashRig) stashAll(o StashOptions) (launches int) {
	r.store.Reset(r.s, o.Bump)
	var at memory.Bytes
	for i, rec := range r.recs {
		for k := range o.Tensors {
			rows := r.live(o, i, k)
			r.s.Copy(rows, r.plain.Slice(at, rows.Len))
			kernels.PutChecksum(r.s, r.sum(i*o.Tensors+k, false), rows)
			at += rows.Len
		}
		launches += r.launched(func() { r.store.Stash(r.s, rec, r.set.All()) })
	}
	return launches
}

// restoreAll restores every group once, into a set whose tensors were cleared.
func (r *stashRig) restoreAll(o StashOptions) (launches int) {
	for i := len(r.recs) - 1; i >= 0; i-- {
		for k := range o.Tensors {
			r.s.Fill(r.layoutOf(i).Tensor(r.set.All(), k), 0)
		}
		launches += r.launched(func() { r.store.Restore(r.s, r.recs[i], r.set.All()) })
		for k := range o.Tensors {
			kernels.PutChecksum(r.s, r.sum(i*o.Tensors+k, true), r.live(o, i, k))
		}
	}
	return launches
}

// prove stashes and restores every group once and returns the launches that a
// group takes.
func (r *stashRig) prove(o StashOptions) (launches int, err error) {
	launches = r.stashAll(o) + r.restoreAll(o)
	if err := r.equal(o.Groups * o.Tensors); err != nil {
		return 0, err
	}
	if launches%o.Groups != 0 {
		return 0, fmt.Errorf("%d launches for %d groups alike; %s", launches, o.Groups, fault)
	}
	return launches / o.Groups, r.sound()
}

const fault = "this is a fault of Stowage, please report it"

// equal compares the first n checksums as given and as found.
func (r *stashRig) equal(n int) error {
	raw := make([]byte, 16*n)
	if err := r.s.Download(raw, r.sums.Slice(0, memory.Bytes(len(raw)))); err != nil {
		return err
	}
	wrong := 0
	for i := range n {
		if binary.LittleEndian.Uint64(raw[16*i:]) != binary.LittleEndian.Uint64(raw[16*i+8:]) {
			wrong++
		}
	}
	if wrong > 0 {
		return fmt.Errorf("%d of %d tensors came back changed; %s", wrong, n, fault)
	}
	return nil
}

// sound reads the store's report on its last step. Every page of the pool must be used, and
// nothing left out.
func (r *stashRig) sound() error {
	rep, err := r.store.Report(r.s)
	if err != nil {
		return err
	}
	var pages uint64
	for _, n := range rep.Need {
		pages += uint64(n)
	}
	switch {
	case rep.Overflows > 0:
		err = fmt.Errorf("%d groups found too few pages, the first %d where it needs %d", rep.Overflows, rep.OverflowFree, rep.OverflowAsked)
	case rep.OverCapacity > 0:
		err = fmt.Errorf("%d tensors have more rows than their buffers, the first %d in room for %d", rep.OverCapacity, rep.OverRows, rep.OverLimit)
	case rep.Stale > 0:
		err = errors.New("the graph that was measured is stale")
	case rep.Stashed != pages:
		err = fmt.Errorf("%d of %d pages were stashed", rep.Stashed, pages)
	}
	if err != nil {
		return fmt.Errorf("%w; %s", err, fault)
	}
	return nil
}
