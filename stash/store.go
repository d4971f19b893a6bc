// Package stash keeps what the backward pass needs of tensors whose sizes only
// the device knows. Experts compute in worst-case buffers that all layers share;
// the live rows are copied out into pages of a store, and copied back before
// the backward pass. Pages are handed out by the kernels themselves, so that the
// host never waits for a row count.
//
// This file owns the store; layout.go and workspace.go the buffers that groups are
// computed in, manager.go when groups move, step.go what happens when a
// step did not fit, verify.go the check of the store's law.
package stash

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/order"
	"github.com/stowage-dev/stowage/kernels"
	"github.com/stowage-dev/stowage/schedule"
)

// Tiers of a store, in the order in which pages are taken.
const (
	Device = kernels.StashDevice
	Host   = kernels.StashHost
	Tiers  = kernels.StashTiers
)

// kinds are the kinds of memory behind the tiers.
var kinds = [Tiers]device.Kind{device.Accel, device.Host}

// Config sizes a store.
type Config struct {
	// Page is the size of a page, a power of two of at least 4 KiB; zero stands
	// for DefaultPage.
	Page device.Bytes
	// Pages are what each tier begins with, and Max what it may grow to.
	Pages, Max [Tiers]schedule.Pages
	// Records is the most memory for page tables; zero stands for 1 GiB. It is
	// reserved, and taken as groups are added: 4 bytes for every page that a
	// group could need at worst.
	Records device.Bytes
	// Assume is the rows that a group is taken to have, under every count, on a device
	// that counts none (package device/null); nil reads what was counted.
	Assume func(schedule.Group) Rows
}

// DefaultPage is the size of a page where none is given.
const DefaultPage = 64 * device.KiB

func (c *Config) check() error {
	if c.Page == 0 {
		c.Page = DefaultPage
	}
	if c.Records == 0 {
		c.Records = device.GiB
	}
	if c.Page < 4*device.KiB || c.Page > device.GiB || c.Page&(c.Page-1) != 0 {
		return fmt.Errorf("stash: a page of %d bytes; give a power of two from 4 KiB to 1 GiB", int64(c.Page))
	}
	if c.Records < 0 {
		return fmt.Errorf("stash: %d bytes for records", int64(c.Records))
	}
	for t, n := range c.Pages {
		if n < 0 || c.Max[t] < n || c.Max[t] > 1<<31 {
			return fmt.Errorf("stash: the %s tier begins with %d pages and may grow to %d; want 0 <= pages <= max <= 2^31", kinds[t], n, c.Max[t])
		}
	}
	return nil
}

// Store hands out pages on one device. Its life cycle:
//
//  1. made by NewStore; records are added.
//  2. between steps: Grow and AddRecord may be called; no work is in flight.
//  3. in a step: Reset comes first on one stream that all others wait for, then
//     stashes on one stream and restores on one stream, each restore after its
//     stash. A step may be captured and replayed; then the host does nothing.
//  4. Report reads what happened; then 2 again, or Close.
//
// A record belongs to one group for good.
//
// At every quiet point tail - head + live = capacity in each tier; the kernels
// keep it (see package kernels), Check verifies it.
type Store struct {
	dev  device.Device
	cfg  Config
	meta *device.Buffer // control block, then what each record needs
	ring *device.Buffer
	pool [Tiers]*device.Buffer
	recs *device.Buffer
	desk *device.Buffer // host memory from which records are written

	rings   [Tiers]device.Bytes // offsets in ring
	used    device.Bytes        // of recs
	onDesk  device.Bytes        // of desk
	records []*Record
	bump    bool
	seq     uint64 // stashes since the reset; of a stack, restores as well
	gen     uint64
	pages   [Tiers]schedule.Pages
	assumed assumption
}

// Record is a group's place in the store: which pages it has.
type Record struct {
	id       int
	group    schedule.Group
	layout   *Layout
	maxPages uint64
	mem      device.Range
	need     device.Range
	desk     device.Range // host memory from which it is written
	stashed  *order.Mark  // the manager's: on out, the copy is done
}

// NewStore makes a store on a device; s carries the first uploads.
func NewStore(dev device.Device, s device.Stream, cfg Config) (*Store, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	st := &Store{dev: dev, cfg: cfg}
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

// ringLength is the length of a ring for so many pages.
func ringLength(n schedule.Pages) uint64 { return 1 << bits.Len64(uint64(max(n, 1)-1)) }

func (st *Store) allocate() (err error) {
	var size device.Bytes
	for t := range st.rings {
		st.rings[t] = size
		size += align(4 * device.Bytes(ringLength(st.cfg.Max[t])))
	}
	if st.ring, err = st.dev.Alloc(device.Accel, size, "stash rings"); err != nil {
		return err
	}
	// A record takes Align bytes at least, which bounds their number.
	if st.meta, err = st.dev.Reserve(device.Accel, kernels.StashControlBytes+8*(st.cfg.Records/device.Align), "stash control"); err != nil {
		return err
	}
	if err = st.dev.Grow(st.meta, kernels.StashControlBytes); err != nil {
		return err
	}
	for t := range st.pool {
		if st.pool[t], err = st.dev.Reserve(kinds[t], device.Bytes(st.cfg.Max[t])*st.cfg.Page, "stash pages"); err != nil {
			return err
		}
	}
	if st.recs, err = st.dev.Reserve(device.Accel, st.cfg.Records, "stash records"); err != nil {
		return err
	}
	st.desk, err = st.dev.Reserve(device.Host, st.cfg.Records, "stash records")
	return err
}

// Close frees the store's memory once the work on s is done.
func (st *Store) Close(s device.Stream) {
	for _, b := range []*device.Buffer{st.meta, st.ring, st.pool[Device], st.pool[Host], st.recs, st.desk} {
		if b != nil {
			s.Free(b)
		}
	}
}

// Page is the size of a page.
func (st *Store) Page() device.Bytes { return st.cfg.Page }

// Pages is the present size of a tier.
func (st *Store) Pages(tier int) schedule.Pages { return st.pages[tier] }

// Max is the size up to which a tier may grow.
func (st *Store) Max(tier int) schedule.Pages { return st.cfg.Max[tier] }

// Grow gives a tier more pages, in place: graphs that use the store stay valid.
// The pages are there from the next Reset on.
func (st *Store) Grow(s device.Stream, tier int, pages schedule.Pages) error {
	if pages > st.cfg.Max[tier] {
		return fmt.Errorf("stash: the %s tier cannot grow to %d pages of %v: at most %d were reserved; raise the tier's maximum",
			kinds[tier], pages, st.cfg.Page, st.cfg.Max[tier])
	}
	if pages <= st.pages[tier] {
		return nil
	}
	if err := st.dev.Grow(st.pool[tier], device.Bytes(pages)*st.cfg.Page); err != nil {
		return err
	}
	st.pages[tier] = pages
	n := uint64(pages)
	at := unsafe.Offsetof(kernels.StashControl{}.Tier) + uintptr(tier)*unsafe.Sizeof(kernels.StashTier{}) +
		unsafe.Offsetof(kernels.StashTier{}.Grown)
	s.Upload(st.meta.Slice(device.Bytes(at), 8), asBytes(&n))
	return nil
}

// AddRecord makes room for the pages of one more group that can be in the store
// at the same time as the others. Widest is the layout with the most rows that the
// group's sets may ever have. The record is written on s, which must not capture:
// a record is there before any step, replayed or not, that uses it.
func (st *Store) AddRecord(s device.Stream, l, widest *Layout, g schedule.Group) (*Record, error) {
	pages := uint64(widest.maxPages(st.cfg.Page))
	size := align(kernels.StashRecordSize(len(l.Tensors), pages))
	if pages > 1<<31-1 {
		return nil, fmt.Errorf("stash: a group of up to %d pages; use larger pages", pages)
	}
	if st.used+size > st.recs.Max() {
		return nil, fmt.Errorf("stash: %d groups of up to %d pages need more than the %v reserved for records; raise Config.Records",
			len(st.records)+1, pages, st.recs.Max())
	}
	if err := st.dev.Grow(st.recs, st.used+size); err != nil {
		return nil, err
	}
	needs := kernels.StashControlBytes + 8*device.Bytes(len(st.records))
	if err := st.dev.Grow(st.meta, needs+8); err != nil {
		return nil, err
	}
	head := kernels.StashRecordSize(len(l.Tensors), 0)
	if err := st.dev.Grow(st.desk, st.onDesk+head); err != nil {
		return nil, err
	}
	r := &Record{
		id: len(st.records), group: g, maxPages: pages,
		mem: st.recs.Slice(st.used, size), need: st.meta.Slice(needs, 8), desk: st.desk.Slice(st.onDesk, head),
	}
	st.used += size
	st.onDesk += head
	st.records = append(st.records, r)
	st.rewrite(s, r, l)
	s.Fill(r.need, 0)
	return r, nil
}

// rewrite gives a record a layout with as many tensors, between steps.
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

// memory is what launches declare.
func (st *Store) memory() *kernels.StashMemory {
	m := &kernels.StashMemory{Control: st.meta.Slice(0, kernels.StashControlBytes), Rings: st.ring.All(), Units: st.dev.Info().Units}
	for t, p := range st.pool {
		m.Pool[t] = p.All()
	}
	return m
}

// Reset begins a step: every page is free. With bump the store is a stack until
// the next reset: groups must be restored in the reverse order of stashing, and
// stashes and restores must follow each other, on one stream or by events.
func (st *Store) Reset(s device.Stream, bump bool) {
	st.seq, st.bump, st.assumed = 0, bump, assumption{}
	needs := st.meta.Slice(kernels.StashControlBytes, 8*device.Bytes(len(st.records)))
	s.Launch(kernels.ResetLaunch(st.memory(), needs, bump, st.gen))
}

func (st *Store) shape(r *Record) uint64 {
	return kernels.StashShape(len(r.layout.Tensors), st.cfg.Page, st.bump)
}

// Stash copies the live rows of a set into pages, and the record remembers
// which.
func (st *Store) Stash(s device.Stream, r *Record, set device.Range) {
	s.Launch(kernels.StashLaunch(st.memory(), r.mem, r.need, set.Slice(0, r.layout.Size), st.seq, st.shape(r)))
	st.seq++
	st.assume(r)
}

// Claim takes pages for as many rows as the set's counts say, and copies nothing:
// a producer that knows its row counts beforehand writes its rows into the pages
// itself, which saves the copy. Table and Pool say where they are; where the
// table says kernels.StashNoPage there was none, and nothing may be written. A
// producer declares the pools Atomic, as stash and restore do. Restore brings the
// rows into a set as if they had been stashed.
func (st *Store) Claim(s device.Stream, r *Record, set device.Range) {
	s.Launch(kernels.ClaimLaunch(st.memory(), r.mem, r.need, set.Slice(0, r.layout.Size), st.seq, st.shape(r)))
	st.seq++
}

// Table is the record's table of page numbers (uint32; the highest bit marks the
// host tier). The pages of a tensor follow those of the tensors before it.
func (st *Store) Table(r *Record) device.Range {
	at := kernels.StashRecordSize(len(r.layout.Tensors), 0)
	return r.mem.Slice(at, 4*device.Bytes(r.maxPages))
}

// Pool is the memory of a tier's pages, from page 0.
func (st *Store) Pool(tier int) device.Range { return st.pool[tier].All() }

// Note looks at the row counts of a set that stays where it is, and raises the
// over-budget flag if it must. It may run beside stashes and restores.
func (st *Store) Note(s device.Stream, r *Record, set device.Range) {
	st.noteAssumed(r)
	s.Launch(kernels.NoteLaunch(st.memory(), r.mem, set.Slice(0, r.layout.Size), st.shape(r)))
}

// Restore copies them into a set and gives the pages back.
func (st *Store) Restore(s device.Stream, r *Record, set device.Range) {
	s.Launch(kernels.RestoreLaunch(st.memory(), r.mem, set.Slice(0, r.layout.Size), st.seq, st.shape(r)))
	if st.bump {
		st.seq++
	}
}

// Report is what a step's launches left on the device.
type Report struct {
	kernels.StashReport
	Low  [Tiers]schedule.Pages // the fewest free pages of each tier
	Need []schedule.Pages      // what the group of each record asked for
}

// Report waits for s, which must come after all work of the step, and reads
// what happened: the one read of device memory in a step.
func (st *Store) Report(s device.Stream) (Report, error) {
	raw := make([]byte, kernels.StashControlBytes+8*device.Bytes(len(st.records)))
	if err := s.Download(raw, st.meta.Slice(0, device.Bytes(len(raw)))); err != nil {
		return Report{}, err
	}
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
	return r, nil
}

// asBytes is the memory of a value.
func asBytes[T any](v *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v))
}

// group is whose record has an id.
func (st *Store) group(id uint64) schedule.Group {
	if id >= uint64(len(st.records)) {
		return schedule.Group{}
	}
	return st.records[id].group
}

// rearrange makes steps captured so far stale, because sets have moved.
func (st *Store) rearrange(s device.Stream) {
	st.gen++
	at := unsafe.Offsetof(kernels.StashControl{}.Generation)
	s.Upload(st.meta.Slice(device.Bytes(at), 8), asBytes(&st.gen))
}

// spoil marks the step that is being issued as one that must not be accepted,
// also when it is replayed.
func (st *Store) spoil(s device.Stream) {
	at := unsafe.Offsetof(kernels.StashControl{}.StashReport) + unsafe.Offsetof(kernels.StashReport{}.Stale)
	s.Fill(st.meta.Slice(device.Bytes(at), 8), 1)
}

// asked is, for each tensor of a layout, the most rows that one of the given
// records of that layout found.
func (st *Store) asked(s device.Stream, l *Layout, records map[schedule.Group]*Record) ([]Rows, error) {
	asked := make([]Rows, len(l.Tensors))
	for _, r := range records {
		if r.layout != l {
			continue
		}
		for i := range asked {
			if st.cfg.Assume != nil {
				asked[i] = max(asked[i], st.cfg.Assume(r.group))
				continue
			}
			var t kernels.StashTensor
			at := kernels.StashRecordSize(i, 0)
			if err := s.Download(asBytes(&t), r.mem.Slice(at, kernels.StashTensorBytes)); err != nil {
				return nil, err
			}
			asked[i] = max(asked[i], Rows(t.Asked))
		}
	}
	return asked, nil
}
