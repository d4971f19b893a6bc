// This file owns the measurement of the stash: groups copied into pages and
// back inside a captured graph, with plain copies of the same bytes beside it.

package bench

import (
	"cmp"
	"encoding/binary"
	"slices"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/kernels"
	"github.com/stowage-dev/stowage/schedule"
	"github.com/stowage-dev/stowage/stash"
)

// StashOptions say what to stash.
type StashOptions struct {
	Rows    stash.Rows   // live rows of each group
	MaxRows stash.Rows   // rows that the buffers hold
	Width   device.Bytes // bytes of a row
	Tensors int          // of each group, which share the width
	Groups  int          // stashed one after the other, then restored
	Page    device.Bytes
	Host    bool // keep the pages in host memory
	Bump    bool // a stack instead of pages
	Line    time.Duration
}

// Stash is the result. Bytes are those of the live rows of one group; a stash
// and its restore each read and write them once.
type Stash struct {
	Device    device.Info  `json:"device"`
	Rows      stash.Rows   `json:"rows"`
	MaxRows   stash.Rows   `json:"max_rows"`
	Width     device.Bytes `json:"width_bytes"`
	Tensors   int          `json:"tensors"`
	Groups    int          `json:"groups"`
	Page      device.Bytes `json:"page_bytes"`
	Tier      string       `json:"tier"`
	Store     string       `json:"store"`
	Bytes     device.Bytes `json:"bytes"`
	PairUS    float64      `json:"pair_us"`
	CopyUS    float64      `json:"copy_pair_us"`
	GBps      float64      `json:"gbps"`
	CopyGBps  float64      `json:"copy_gbps"`
	Ratio     float64      `json:"ratio"`
	Launches  int          `json:"launches"` // a group, stash and restore together
	PoolBytes device.Bytes `json:"pool_bytes"`
}

// stashRig is the store, the set and the plain buffers.
type stashRig struct {
	dev    device.Device
	s      device.Stream
	store  *stash.Store
	layout *stash.Layout
	set    *device.Buffer
	plain  *device.Buffer
	recs   []*stash.Record
	graphs []device.Graph
}

func (o StashOptions) tier() int {
	if o.Host {
		return stash.Host
	}
	return stash.Device
}

func newStashRig(dev device.Device, o StashOptions) (r *stashRig, err error) {
	r = &stashRig{dev: dev}
	defer func() {
		if err != nil {
			_ = r.close() // the first error says more
			r = nil
		}
	}()
	if r.s, err = dev.NewStream("bench"); err != nil {
		return r, err
	}
	tensors := make([]stash.Tensor, o.Tensors)
	for i := range tensors {
		tensors[i] = stash.Tensor{Name: "tensor", Row: o.Width, MaxRows: o.MaxRows}
	}
	if r.layout, err = stash.NewLayout(tensors...); err != nil {
		return r, err
	}
	cfg := stash.Config{Page: o.Page}
	pages := schedule.Pages(o.Groups) * r.layout.Pages(o.Page, o.Rows)
	cfg.Pages[o.tier()], cfg.Max[o.tier()] = pages, pages
	if r.store, err = stash.NewStore(dev, r.s, cfg); err != nil {
		return r, err
	}
	if r.set, err = dev.Alloc(device.Accel, r.layout.Size, "bench"); err != nil {
		return r, err
	}
	kind := device.Accel
	if o.Host {
		kind = device.Host
	}
	// As much as the pool, so that caches help neither more than the other.
	if r.plain, err = dev.Alloc(kind, o.bytes()*device.Bytes(o.Groups), "bench"); err != nil {
		return r, err
	}
	r.s.Fill(r.set.All(), 1)
	r.s.Fill(r.plain.All(), 2)
	rows := binary.LittleEndian.AppendUint64(nil, uint64(o.Rows))
	r.s.Upload(r.layout.Counts(r.set.All()), rows)
	for range o.Groups {
		rec, err := r.store.AddRecord(r.s, r.layout, schedule.Group{Name: "bench", Layer: len(r.recs)})
		if err != nil {
			return r, err
		}
		r.recs = append(r.recs, rec)
	}
	return r, r.s.Sync()
}

// bytes are the live bytes of a group.
func (o StashOptions) bytes() device.Bytes {
	return device.Bytes(o.Rows) * o.Width * device.Bytes(o.Tensors)
}

func (r *stashRig) close() (first error) {
	for _, g := range r.graphs {
		first = cmp.Or(first, g.Close())
	}
	if r.store != nil {
		r.store.Close(r.s)
	}
	for _, b := range []*device.Buffer{r.set, r.plain} {
		if b != nil {
			r.s.Free(b)
		}
	}
	if r.s != nil {
		first = cmp.Or(first, r.s.Sync(), r.s.Close())
	}
	return first
}

// ways are the graphs: stashes and restores, and plain copies out and back, by
// the device's copy and, inside device memory, by the copy kernel.
func (r *stashRig) ways(o StashOptions) ([]way, error) {
	live := r.set.Slice(0, o.bytes())
	plain := func(copyNow func(dst, src device.Range)) func() {
		return func() {
			for i := range r.recs {
				copyNow(r.plain.Slice(device.Bytes(i)*o.bytes(), o.bytes()), live)
			}
			for i := len(r.recs) - 1; i >= 0; i-- {
				copyNow(live, r.plain.Slice(device.Bytes(i)*o.bytes(), o.bytes()))
			}
		}
	}
	issue := []func(){
		func() {
			r.store.Reset(r.s, o.Bump)
			for _, rec := range r.recs {
				r.store.Stash(r.s, rec, r.set.All())
			}
			for i := len(r.recs) - 1; i >= 0; i-- {
				r.store.Restore(r.s, r.recs[i], r.set.All())
			}
		},
		plain(r.s.Copy),
	}
	if !o.Host {
		issue = append(issue, plain(func(dst, src device.Range) { kernels.Copy(r.s, dst, src) }))
	}
	var ways []way
	for _, f := range issue {
		g, err := capture(r.s, 1, f)
		if err != nil {
			return nil, err
		}
		r.graphs = append(r.graphs, g)
		ways = append(ways, way{"", o.Groups, func(n int) error {
			for range n {
				r.s.Replay(g)
			}
			return r.s.Sync()
		}})
	}
	return ways, nil
}

// Stashes measures one setting.
func Stashes(dev device.Device, o StashOptions) (res Stash, err error) {
	r, err := newStashRig(dev, o)
	if err != nil {
		return res, err
	}
	defer func() { err = cmp.Or(err, r.close()) }()
	ways, err := r.ways(o)
	if err != nil {
		return res, err
	}
	times, err := Options{Line: o.Line}.compare(ways)
	if err != nil {
		return res, err
	}
	moved := 4 * o.bytes() // read and written, out and back
	plain := slices.Min(times[1:])
	res = Stash{
		Device: dev.Info(), Rows: o.Rows, MaxRows: o.MaxRows, Width: o.Width, Tensors: o.Tensors, Groups: o.Groups, Page: o.Page,
		Tier: "device", Store: "pages", Bytes: o.bytes(),
		PairUS: times[0].Seconds() * 1e6, CopyUS: plain.Seconds() * 1e6,
		GBps: gbps(moved, times[0]), CopyGBps: gbps(moved, plain), Launches: 2,
		PoolBytes: device.Bytes(r.store.Pages(o.tier())) * o.Page,
	}
	if o.Host {
		res.Tier = "host"
		res.GBps, res.CopyGBps = res.GBps/2, res.CopyGBps/2 // over the link, bytes count once
	}
	if o.Bump {
		res.Store = "stack"
	}
	res.Ratio = float64(plain) / float64(max(times[0], 1))
	return res, nil
}
