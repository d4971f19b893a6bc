// This file owns the accounting of memory that all devices share.

package device

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
)

// Usage is a reading of the ledger.
type Usage struct {
	Kind   [Kinds]KindUsage `json:"kind"`
	Owners []OwnerUsage     `json:"owners"` // by kind, then largest peak first
}

// KindUsage is the memory of one kind. Pending bytes are part of Current: they
// were freed, but work issued earlier may still touch them.
type KindUsage struct {
	Current  Bytes `json:"current"`
	Pending  Bytes `json:"pending"`
	Peak     Bytes `json:"peak"`
	Capacity Bytes `json:"capacity"`
}

// OwnerUsage is the memory of one kind under one owner tag.
type OwnerUsage struct {
	Owner   string `json:"owner"`
	Kind    Kind   `json:"kind"`
	Current Bytes  `json:"current"`
	Peak    Bytes  `json:"peak"`
}

// Ledger counts the bytes a device handed out, exactly as they were asked for.
// For each kind, at every point:
//
//	live + pending + free = capacity
//
// where current = live + pending, and current is the sum over the owners. A
// ledger that would break the law panics.
type Ledger struct {
	device string

	mu     sync.Mutex
	watch  Observer // or nil
	frozen bool
	kinds  [Kinds]KindUsage
	owners [Kinds]map[string]*OwnerUsage
}

// NewLedger makes the ledger of a device; a capacity is the most that may be
// handed out of a kind.
func NewLedger(device string, capacity [Kinds]Bytes) *Ledger {
	l := &Ledger{device: device}
	for k := range l.kinds {
		l.kinds[k].Capacity = capacity[k]
		l.owners[k] = map[string]*OwnerUsage{}
	}
	return l
}

// Observe has an observer told of what is taken and given back from now on, in order.
func (l *Ledger) Observe(o Observer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.watch = o
}

// Freeze makes every later Alloc a programmer's error.
func (l *Ledger) Freeze() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.frozen = true
}

// Alloc takes n bytes for a new buffer.
func (l *Ledger) Alloc(kind Kind, n Bytes, owner string) error {
	if n < 0 || kind >= Kinds {
		panic(fmt.Sprintf("device: %q asked for %d bytes of %v memory", owner, int64(n), kind))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.frozen {
		panic(fmt.Sprintf("device: %q allocates %v of %s memory after the freeze; reserve it beforehand and grow it", owner, n, kind))
	}
	return l.take(kind, n, owner)
}

// Grow takes n more bytes for a reserved buffer, also after the freeze.
func (l *Ledger) Grow(kind Kind, n Bytes, owner string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.take(kind, n, owner)
}

func (l *Ledger) take(kind Kind, n Bytes, owner string) error {
	if n < 0 {
		panic(fmt.Sprintf("device: %q grows by %d bytes", owner, int64(n)))
	}
	k := &l.kinds[kind]
	if free := k.Capacity - k.Current; n > free {
		return &OutOfMemory{
			Device: l.device, Kind: kind, Owner: owner,
			Asked: n, Free: free, Capacity: k.Capacity, Pending: k.Pending, Owners: l.holders(kind),
		}
	}
	k.Current += n
	k.Peak = max(k.Peak, k.Current)
	o := l.owners[kind][owner]
	if o == nil {
		o = &OwnerUsage{Owner: owner, Kind: kind}
		l.owners[kind][owner] = o
	}
	o.Current += n
	o.Peak = max(o.Peak, o.Current)
	if l.watch != nil && n != 0 {
		l.watch.Took(kind, owner, n, k.Current)
	}
	return nil
}

// holders lists who has memory of a kind now, largest first.
func (l *Ledger) holders(kind Kind) []OwnerUsage {
	var os []OwnerUsage
	for _, o := range l.owners[kind] {
		if o.Current > 0 {
			os = append(os, *o)
		}
	}
	slices.SortFunc(os, func(a, b OwnerUsage) int {
		return cmp.Or(cmp.Compare(b.Current, a.Current), cmp.Compare(a.Owner, b.Owner))
	})
	return os
}

// Pend notes that n bytes were freed and wait for their stream.
func (l *Ledger) Pend(kind Kind, n Bytes) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := &l.kinds[kind]
	k.Pending += n
	if n < 0 || k.Pending > k.Current {
		panic(fmt.Sprintf("device: %v of %s memory pending, but only %v handed out", k.Pending, kind, k.Current))
	}
}

// Release gives n pending bytes back.
func (l *Ledger) Release(kind Kind, n Bytes, owner string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k, o := &l.kinds[kind], l.owners[kind][owner]
	k.Pending -= n
	l.giveBack(k, o, n)
}

// Undo takes back what Alloc or Grow granted when the memory behind it could
// not be had after all.
func (l *Ledger) Undo(kind Kind, n Bytes, owner string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.giveBack(&l.kinds[kind], l.owners[kind][owner], n)
}

func (l *Ledger) giveBack(k *KindUsage, o *OwnerUsage, n Bytes) {
	if o == nil || n < 0 || n > o.Current || k.Pending < 0 || n > k.Current-k.Pending {
		panic(fmt.Sprintf("device: release of %d bytes that were not handed out", int64(n)))
	}
	k.Current -= n
	o.Current -= n
	if l.watch != nil && n != 0 {
		l.watch.Took(o.Kind, o.Owner, -n, k.Current)
	}
}

// OutOfMemory is the error for memory that the ledger would grant but the
// machine does not have; free is what the machine says.
func (l *Ledger) OutOfMemory(kind Kind, asked, free Bytes, owner string) *OutOfMemory {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := &l.kinds[kind]
	return &OutOfMemory{
		Device: l.device, Kind: kind, Owner: owner,
		Asked: asked, Free: free, Capacity: k.Capacity, Pending: k.Pending, Owners: l.holders(kind),
	}
}

// Usage reads the ledger.
func (l *Ledger) Usage() Usage {
	l.mu.Lock()
	defer l.mu.Unlock()
	u := Usage{Kind: l.kinds}
	for k := range l.owners {
		for _, o := range l.owners[k] {
			u.Owners = append(u.Owners, *o)
		}
	}
	slices.SortFunc(u.Owners, func(a, b OwnerUsage) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(b.Peak, a.Peak), cmp.Compare(a.Owner, b.Owner))
	})
	return u
}

// Leaks is nil if everything was given back, or an error that names who kept
// memory.
func (l *Ledger) Leaks() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for k := range l.owners {
		if os := l.holders(Kind(k)); len(os) > 0 {
			return fmt.Errorf("%s: %v of %s memory was never freed; the largest holder is %q with %v",
				l.device, l.kinds[k].Current, Kind(k), os[0].Owner, os[0].Current)
		}
	}
	return nil
}
