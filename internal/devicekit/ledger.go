// This file owns the accounting of memory that all devices share.

package devicekit

import (
	"cmp"
	"fmt"
	"slices"
	"sync"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// Ledger counts the bytes that a device has handed out, exactly as they were asked for.
// For each kind, at every point:
//
//	live + pending + free = capacity
//
// where current = live + pending, and current is the sum over the owners. A call that
// would break this law panics. The methods may be called from any goroutine.
type Ledger struct {
	name string

	mu     sync.Mutex
	watch  device.Observer // or nil
	frozen bool
	kinds  [memory.Kinds]device.KindUsage
	owners [memory.Kinds]map[string]*device.OwnerUsage
}

// NewLedger returns the ledger of a device. A capacity is the most that may be handed out
// of a kind.
func NewLedger(name string, capacity [memory.Kinds]memory.Bytes) *Ledger {
	l := &Ledger{name: name}
	for k := range l.kinds {
		l.kinds[k].Capacity = capacity[k]
		l.owners[k] = map[string]*device.OwnerUsage{}
	}
	return l
}

// Observe makes the ledger call the observer for every change from now on, in order. Nil
// stops that.
func (l *Ledger) Observe(o device.Observer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.watch = o
}

// Freeze makes every later Alloc panic.
func (l *Ledger) Freeze() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.frozen = true
}

// Alloc counts n bytes for a new buffer. It returns a [device.OutOfMemory] if they are not
// free, and panics after Freeze.
func (l *Ledger) Alloc(kind memory.Kind, n memory.Bytes, owner string) error {
	if n < 0 || kind >= memory.Kinds {
		panic(fmt.Sprintf("device: %q asked for %d bytes of %v memory; expected a size of at least zero and a known kind", owner, int64(n), kind))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.frozen {
		panic(fmt.Sprintf("device: %q allocates %v of %s memory after the freeze; reserve it before and grow it", owner, n, kind))
	}
	return l.charge(kind, n, owner)
}

// Grow counts n more bytes for a reserved buffer, after Freeze too. It returns a
// [device.OutOfMemory] if they are not free.
func (l *Ledger) Grow(kind memory.Kind, n memory.Bytes, owner string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.charge(kind, n, owner)
}

func (l *Ledger) charge(kind memory.Kind, n memory.Bytes, owner string) error {
	if n < 0 {
		panic(fmt.Sprintf("device: %q grows by %d bytes; expected at least zero", owner, int64(n)))
	}
	k := &l.kinds[kind]
	if free := k.Capacity - k.Current; n > free {
		return &device.OutOfMemory{
			Device: l.name, Kind: kind, Owner: owner,
			Asked: n, Free: free, Capacity: k.Capacity, Pending: k.Pending, Owners: l.holders(kind),
		}
	}
	k.Current += n
	k.Peak = max(k.Peak, k.Current)
	o := l.owners[kind][owner]
	if o == nil {
		o = &device.OwnerUsage{Owner: owner, Kind: kind}
		l.owners[kind][owner] = o
	}
	o.Current += n
	o.Peak = max(o.Peak, o.Current)
	if l.watch != nil && n != 0 {
		l.watch.MemoryChanged(kind, owner, n, k.Current)
	}
	return nil
}

// holders returns the owners that hold memory of a kind now, largest first.
func (l *Ledger) holders(kind memory.Kind) []device.OwnerUsage {
	var os []device.OwnerUsage
	for _, o := range l.owners[kind] {
		if o.Current > 0 {
			os = append(os, *o)
		}
	}
	slices.SortFunc(os, func(a, b device.OwnerUsage) int {
		return cmp.Or(cmp.Compare(b.Current, a.Current), cmp.Compare(a.Owner, b.Owner))
	})
	return os
}

// MarkPending notes that n bytes were freed and wait for their stream.
func (l *Ledger) MarkPending(kind memory.Kind, n memory.Bytes) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := &l.kinds[kind]
	k.Pending += n
	if n < 0 || k.Pending > k.Current {
		panic(fmt.Sprintf("device: %v of %s memory pending, but only %v handed out", k.Pending, kind, k.Current))
	}
}

// Release makes n pending bytes free.
func (l *Ledger) Release(kind memory.Kind, n memory.Bytes, owner string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k, o := &l.kinds[kind], l.owners[kind][owner]
	k.Pending -= n
	l.credit(k, o, n)
}

// Undo makes n bytes free that Alloc or Grow counted, if the machine did not have the
// memory after all.
func (l *Ledger) Undo(kind memory.Kind, n memory.Bytes, owner string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.credit(&l.kinds[kind], l.owners[kind][owner], n)
}

func (l *Ledger) credit(k *device.KindUsage, o *device.OwnerUsage, n memory.Bytes) {
	if o == nil || n < 0 || n > o.Current || k.Pending < 0 || n > k.Current-k.Pending {
		panic(fmt.Sprintf("device: release of %d bytes that were not handed out", int64(n)))
	}
	k.Current -= n
	o.Current -= n
	if l.watch != nil && n != 0 {
		l.watch.MemoryChanged(o.Kind, o.Owner, -n, k.Current)
	}
}

// OutOfMemory returns the error for memory that the ledger has free but the machine has
// not. Free is what the machine has.
func (l *Ledger) OutOfMemory(kind memory.Kind, asked, free memory.Bytes, owner string) *device.OutOfMemory {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := &l.kinds[kind]
	return &device.OutOfMemory{
		Device: l.name, Kind: kind, Owner: owner,
		Asked: asked, Free: free, Capacity: k.Capacity, Pending: k.Pending, Owners: l.holders(kind),
	}
}

// Usage returns the present account.
func (l *Ledger) Usage() device.Usage {
	l.mu.Lock()
	defer l.mu.Unlock()
	u := device.Usage{Kind: l.kinds}
	for k := range l.owners {
		for _, o := range l.owners[k] {
			u.Owners = append(u.Owners, *o)
		}
	}
	slices.SortFunc(u.Owners, func(a, b device.OwnerUsage) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(b.Peak, a.Peak), cmp.Compare(a.Owner, b.Owner))
	})
	return u
}

// Leaks returns nil if all memory was freed, or else an error that names the largest
// holder.
func (l *Ledger) Leaks() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for k := range l.owners {
		if os := l.holders(memory.Kind(k)); len(os) > 0 {
			return fmt.Errorf("%s: %v of %s memory was never freed; the largest holder is %q with %v",
				l.name, l.kinds[k].Current, memory.Kind(k), os[0].Owner, os[0].Current)
		}
	}
	return nil
}
