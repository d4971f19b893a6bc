// Package stash holds the saved rows of experts, whose number only the device knows.
// Experts compute in a workspace: worst-case buffers that all layers share. The stash
// copies the live rows into pages, and copies them back before the backward pass. Kernels
// hand out the pages, so that the host never waits for a row count.
//
// A Manager drives a step: it has a Store of pages and the Workspaces. Berths hold rows of
// tensors that the caller allocates.
//
// This file owns the store. layout.go and workspace.go own the buffers of groups,
// manager.go the order in which groups move, step.go reruns, berths.go berths, assume.go
// assumed rows, and verify.go the check of a store.
package stash

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/order"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// The tiers of a store, in the order in which it takes pages, and their number.
const (
	Device = kernels.StashDevice
	Host   = kernels.StashHost
	Tiers  = kernels.StashTiers
)

// kinds holds the kind of memory of each tier.
var kinds = [Tiers]memory.Kind{memory.Device, memory.Host}

// PagesOwner is the owner under which ledgers count pages.
const PagesOwner = "stash pages"

// Config holds the sizes of a store.
type Config struct {
	// Page is the size of a page: a power of two from 4 KiB to 1 GiB. Zero selects
	// DefaultPage.
	Page memory.Bytes
	// Pages is the number of pages that each tier begins with, and Max the number that it
	// may grow to.
	Pages, Max [Tiers]schedule.Pages
	// Records is the most memory for page tables. Zero selects 1 GiB. The store reserves
	// addresses for it, and allocates 4 bytes for every page that a group may need when
	// the group is added.
	Records memory.Bytes
	// Assume returns the rows of a group, for every row count, on a device that executes no
	// kernels (package nulldevice). Nil uses the rows that kernels counted.
	Assume func(memory.GroupID) Rows
}

// DefaultPage is the size of a page if Config.Page is zero.
const DefaultPage = 64 * memory.KiB

func (c *Config) check() error {
	if c.Page == 0 {
		c.Page = DefaultPage
	}
	if c.Records == 0 {
		c.Records = memory.GiB
	}
	if c.Page < 4*memory.KiB || c.Page > memory.GiB || c.Page&(c.Page-1) != 0 {
		return fmt.Errorf("stash: expected a page size that is a power of two from 4 KiB to 1 GiB, got %d bytes", int64(c.Page))
	}
	if c.Records < 0 {
		return fmt.Errorf("stash: expected a positive size for Records, got %d bytes", int64(c.Records))
	}
	for t, n := range c.Pages {
		if n < 0 || c.Max[t] < n || c.Max[t] > 1<<31 {
			return fmt.Errorf("stash: the %s tier begins with %d pages and may grow to %d; give 0 <= Pages <= Max <= 2^31", kinds[t], n, c.Max[t])
		}
	}
	return nil
}

// Store hands out pages on one device. Its life cycle:
//
//  1. NewStore creates it, and AddRecord adds records.
//  2. Between steps, Grow and AddRecord may be called while no work is in flight.
//  3. In a step, Reset comes first on one stream that all others wait for. Stashes
//     follow on one stream and restores on one stream, each restore after its stash. A
//     step may be captured and replayed; the host then does nothing.
//  4. Report reads the results of the step. Then continue with 2, or call Close.
//
// A record belongs to one group forever.
//
// While no work is in flight, tail - head + live = capacity holds in each tier. The
// kernels keep it so (see package kernels), and Check verifies it.
type Store struct {
	dev  device.Device
	cfg  Config
	meta *device.Buffer // control block, then the pages that each record needs
	ring *device.Buffer
	pool [Tiers]*device.Buffer
	recs *device.Buffer
	desk *device.Buffer // host memory that records are uploaded from

	rings   [Tiers]memory.Bytes // offsets in ring
	used    memory.Bytes        // bytes of recs
	onDesk  memory.Bytes        // bytes of desk
	records []*Record
	bump    bool
	seq     uint64 // stashes since the reset; in a stack, also restores
	gen     uint64
	pages   [Tiers]schedule.Pages
	most    [Tiers]schedule.Pages // the most pages of each tier, at most cfg.Max
	assumed assumption
}

// Record is the page table of one group: it holds the pages that the group has.
type Record struct {
	id       int
	store    *Store
	group    memory.GroupID
	layout   *Layout
	maxPages uint64
	mem      device.Range
	need     device.Range
	desk     device.Range // host memory that it is uploaded from
	stashed  *order.Mark  // used by the manager: the copy on out is done
}

// NewStore returns a store on a device and issues its first uploads on s. It returns an
// error if a size is out of range or the device has too little memory.
func NewStore(dev device.Device, s device.Stream, cfg Config) (*Store, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	st := &Store{dev: dev, cfg: cfg, most: cfg.Max}
	if err := st.allocate(); err != nil {
		st.Close(s)
		return nil, err
	}
	c := kernels.StashControl{Page: uint64(cfg.Page)}
	for t := range c.Tier {
		c.Tier[t].Pool = uint64(st.pool[t].Addr())
		c.Tier[t].Ring = uint64(st.ring.Addr()) + uint64(st.rings[t])
		c.Tier[t].Mask = ringLength(cfg.Max[t]) - 1
	}
	s.Upload(st.meta.Slice(0, kernels.StashControlBytes), asBytes(&c))
	for t, n := range cfg.Pages {
		if err := st.Grow(s, t, n); err != nil {
			st.Close(s)
			return nil, err
		}
	}
	st.Reset(s, false)
	return st, nil
}

// ringLength returns the length of a ring for n pages.
func ringLength(n schedule.Pages) uint64 { return 1 << bits.Len64(uint64(max(n, 1)-1)) }

func (st *Store) allocate() (err error) {
	var size memory.Bytes
	for t := range st.rings {
		st.rings[t] = size
		size += align(4 * memory.Bytes(ringLength(st.cfg.Max[t])))
	}
	if st.ring, err = st.dev.Alloc(memory.Device, size, "stash rings"); err != nil {
		return err
	}
	// A record takes at least Align bytes, which limits the number of records.
	if st.meta, err = st.dev.Reserve(memory.Device, kernels.StashControlBytes+8*(st.cfg.Records/device.Align), "stash control"); err != nil {
		return err
	}
	if err = st.dev.Grow(st.meta, kernels.StashControlBytes); err != nil {
		return err
	}
	for t := range st.pool {
		if st.pool[t], err = st.dev.Reserve(kinds[t], memory.Bytes(max(st.cfg.Max[t], 1))*st.cfg.Page, PagesOwner); err != nil {
			return err
		}
	}
	if st.recs, err = st.dev.Reserve(memory.Device, st.cfg.Records, "stash records"); err != nil {
		return err
	}
	st.desk, err = st.dev.Reserve(memory.Host, st.cfg.Records, "stash records")
	return err
}

// Close frees the store's memory after the work on s is done.
func (st *Store) Close(s device.Stream) {
	for _, b := range []*device.Buffer{st.meta, st.ring, st.pool[Device], st.pool[Host], st.recs, st.desk} {
		if b != nil {
			s.Free(b)
		}
	}
}

// Page returns the size of a page.
func (st *Store) Page() memory.Bytes { return st.cfg.Page }

// Pages returns the current number of pages in a tier.
func (st *Store) Pages(tier int) schedule.Pages { return st.pages[tier] }

// Max returns the number of pages that a tier may grow to.
func (st *Store) Max(tier int) schedule.Pages { return st.most[tier] }

// Resize gives a tier exactly the given number of pages, which is then also its maximum.
// Call it between steps while no work is in flight. A tier that gets smaller gets new
// memory.
func (st *Store) Resize(s device.Stream, tier int, pages schedule.Pages) error {
	pages = min(pages, st.cfg.Max[tier])
	if pages < st.pages[tier] {
		s.Free(st.pool[tier])
		st.pool[tier] = nil
		st.announce(s, tier, 0)
		if err := s.Sync(); err != nil {
			return err
		}
		var err error
		if st.pool[tier], err = st.dev.Reserve(kinds[tier], memory.Bytes(max(st.cfg.Max[tier], 1))*st.cfg.Page, PagesOwner); err != nil {
			return err
		}
		addr := uint64(st.pool[tier].Addr())
		s.Upload(st.tierField(tier, unsafe.Offsetof(kernels.StashTier{}.Pool)), asBytes(&addr))
	}
	st.most[tier] = pages
	return st.Grow(s, tier, pages)
}

// tierField returns the memory of a field of a tier's control block.
func (st *Store) tierField(tier int, offset uintptr) device.Range {
	at := unsafe.Offsetof(kernels.StashControl{}.Tier) + uintptr(tier)*unsafe.Sizeof(kernels.StashTier{}) + offset
	return st.meta.Slice(memory.Bytes(at), 8)
}

// Grow gives a tier more pages in place, so that graphs that use the store stay valid. The
// pages can be used after the next Reset. Grow returns an error if pages is more than the
// tier's maximum or the memory is short.
func (st *Store) Grow(s device.Stream, tier int, pages schedule.Pages) error {
	if pages > st.most[tier] {
		return fmt.Errorf("stash: the %s tier cannot grow to %d pages of %v: it may have at most %d; raise its maximum",
			kinds[tier], pages, st.cfg.Page, st.most[tier])
	}
	if pages <= st.pages[tier] {
		return nil
	}
	if err := st.dev.Grow(st.pool[tier], memory.Bytes(pages)*st.cfg.Page); err != nil {
		return err
	}
	st.announce(s, tier, pages)
	return nil
}

// announce tells the kernels how many pages a tier has from the next Reset on.
func (st *Store) announce(s device.Stream, tier int, pages schedule.Pages) {
	st.pages[tier] = pages
	n := uint64(pages)
	s.Upload(st.tierField(tier, unsafe.Offsetof(kernels.StashTier{}.Grown)), asBytes(&n))
}

// AddRecord adds a record for one more group that can be in the store at the same time as
// the others. widest is the layout with the most rows that the group's sets may ever
// have. The record is written on s, which must not be capturing, so that the record exists
// before any step that uses it.
func (st *Store) AddRecord(s device.Stream, l, widest *Layout, g memory.GroupID) (*Record, error) {
	pages := uint64(widest.maxPages(st.cfg.Page))
	size := align(kernels.StashRecordSize(len(l.Tensors), pages))
	if pages > 1<<31-1 {
		return nil, fmt.Errorf("stash: a group may need %d pages, which is too many; use larger pages", pages)
	}
	if st.used+size > st.recs.Max() {
		return nil, fmt.Errorf("stash: %d groups of up to %d pages need more than the %v reserved for records; use fewer microbatches or larger pages, or raise Config.Records",
			len(st.records)+1, pages, st.recs.Max())
	}
	if err := st.dev.Grow(st.recs, st.used+size); err != nil {
		return nil, err
	}
	needs := kernels.StashControlBytes + 8*memory.Bytes(len(st.records))
	if err := st.dev.Grow(st.meta, needs+8); err != nil {
		return nil, err
	}
	head := kernels.StashRecordSize(len(l.Tensors), 0)
	if err := st.dev.Grow(st.desk, st.onDesk+head); err != nil {
		return nil, err
	}
	r := &Record{
		id: len(st.records), store: st, group: g, maxPages: pages,
		mem: st.recs.Slice(st.used, size), need: st.meta.Slice(needs, 8), desk: st.desk.Slice(st.onDesk, head),
	}
	st.used += size
	st.onDesk += head
	st.records = append(st.records, r)
	st.rewrite(s, r, l)
	s.Fill(r.need, 0)
	return r, nil
}

// rewrite gives a record another layout with the same number of tensors, between steps.
func (st *Store) rewrite(s device.Stream, r *Record, l *Layout) {
	r.layout = l
	head := kernels.StashRecord{ID: uint64(r.id), Tensors: uint64(len(l.Tensors)), MaxPages: r.maxPages, Need: uint64(r.need.Addr())}
	raw := append([]byte(nil), asBytes(&head)...)
	for _, t := range l.table() {
		raw = append(raw, asBytes(&t)...)
	}
	copy(st.dev.View(r.desk, device.Write), raw)
	s.Copy(r.mem.Slice(0, r.desk.Len), r.desk)
}

// memory returns the memory that launches declare.
func (st *Store) memory() *kernels.StashMemory {
	m := &kernels.StashMemory{Control: st.meta.Slice(0, kernels.StashControlBytes), Rings: st.ring.All(), Units: st.dev.Info().Units}
	for t, p := range st.pool {
		m.Pool[t] = p.All()
	}
	return m
}

// Reset begins a step and frees all pages. If bump is set, the store is a stack until the
// next Reset: groups must be restored in the reverse order of stashing, and stashes and
// restores must run one after the other, on one stream or ordered by events.
func (st *Store) Reset(s device.Stream, bump bool) {
	st.seq, st.bump, st.assumed = 0, bump, assumption{}
	needs := st.meta.Slice(kernels.StashControlBytes, 8*memory.Bytes(len(st.records)))
	s.Launch(kernels.ResetLaunch(st.memory(), needs, bump, st.gen))
}

func (st *Store) shape(r *Record) uint64 {
	return kernels.StashShape(len(r.layout.Tensors), st.cfg.Page, st.bump)
}

// Stash copies the live rows of a set into pages and notes the pages in the record.
func (st *Store) Stash(s device.Stream, r *Record, set device.Range) {
	s.Launch(kernels.StashLaunch(st.memory(), r.mem, r.need, set.Slice(0, r.layout.Size), st.seq, st.shape(r)))
	st.seq++
	st.assume(r)
}

// Pool returns the memory of a tier's pages, beginning with page 0.
func (st *Store) Pool(tier int) device.Range { return st.pool[tier].All() }

// Note reads the row counts of a set that is not stashed, and counts its tensors that are
// over capacity: those with more rows than their buffer holds. It may run at the same time
// as stashes and restores.
func (st *Store) Note(s device.Stream, r *Record, set device.Range) {
	st.noteAssumed(r)
	s.Launch(kernels.NoteLaunch(st.memory(), r.mem, set.Slice(0, r.layout.Size), st.shape(r)))
}

// Restore copies the rows of a record into a set and frees their pages.
func (st *Store) Restore(s device.Stream, r *Record, set device.Range) {
	s.Launch(kernels.RestoreLaunch(st.memory(), r.mem, set.Slice(0, r.layout.Size), st.seq, st.shape(r)))
	if st.bump {
		st.seq++
	}
}

// Report holds what a step's kernels reported.
type Report struct {
	kernels.StashReport
	Low  [Tiers]schedule.Pages // the fewest free pages of each tier
	Need []schedule.Pages      // the pages that the group of each record asked for
}

// Report waits for s, which must come after all work of the step, and returns the step's
// report. This is the only read of device memory in a step.
func (st *Store) Report(s device.Stream) (Report, error) {
	from := st.reported()
	raw := make([]byte, from.Len)
	if err := s.Download(raw, from); err != nil {
		return Report{}, err
	}
	return st.report(raw), nil
}

// reported returns the memory that a report is read from.
func (st *Store) reported() device.Range {
	return st.meta.Slice(0, kernels.StashControlBytes+8*memory.Bytes(len(st.records)))
}

// report decodes a report from the bytes that were read.
func (st *Store) report(raw []byte) Report {
	var c kernels.StashControl
	copy(asBytes(&c), raw)
	r := Report{StashReport: c.StashReport, Need: make([]schedule.Pages, len(st.records))}
	for t := range r.Low {
		r.Low[t] = schedule.Pages(c.Tier[t].Low)
	}
	for i := range r.Need {
		r.Need[i] = schedule.Pages(binary.LittleEndian.Uint64(raw[int(kernels.StashControlBytes)+8*i:]))
	}
	if st.cfg.Assume != nil {
		st.assumed.report(&r)
	}
	return r
}

// asBytes returns the memory of a value.
func asBytes[T any](v *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v))
}

// group returns the group of the record with an id.
func (st *Store) group(id uint64) memory.GroupID {
	if id >= uint64(len(st.records)) {
		return memory.GroupID{}
	}
	return st.records[id].group
}

// rearrange makes captured steps stale, because sets have moved.
func (st *Store) rearrange(s device.Stream) {
	st.gen++
	at := unsafe.Offsetof(kernels.StashControl{}.Generation)
	s.Upload(st.meta.Slice(memory.Bytes(at), 8), asBytes(&st.gen))
}

// spoil marks the step that is being issued as stale, so that it is refused, also when it
// is replayed.
func (st *Store) spoil(s device.Stream) {
	at := unsafe.Offsetof(kernels.StashControl{}.StashReport) + unsafe.Offsetof(kernels.StashReport{}.Stale)
	s.Fill(st.meta.Slice(memory.Bytes(at), 8), 1)
}

// asked returns, for each tensor of a workspace, the most rows that any of the records
// counted.
func (w *Workspace) asked(records map[memory.GroupID]*Record) ([]Rows, error) {
	asked := make([]Rows, len(w.layout.Tensors))
	for _, r := range records {
		if r.layout != w.layout {
			continue
		}
		for i := range asked {
			if assume := r.store.cfg.Assume; assume != nil {
				asked[i] = max(asked[i], assume(r.group))
				continue
			}
			var t kernels.StashTensor
			at := kernels.StashRecordSize(i, 0)
			if err := w.m.compute.Stream.Download(asBytes(&t), r.mem.Slice(at, kernels.StashTensorBytes)); err != nil {
				return nil, err
			}
			asked[i] = max(asked[i], Rows(t.Asked))
		}
	}
	return asked, nil
}
