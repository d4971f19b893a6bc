// This file owns the measurement of the stash: groups are copied into pages and back inside
// a captured graph, and compared with plain copies of the same bytes. stashproof.go checks
// that the bytes are restored.

package bench

import (
	"cmp"
	"encoding/binary"
	"math"
	"slices"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
)

// StashOptions says what to stash.
type StashOptions struct {
	Rows    stash.Rows   // live rows of each group
	MaxRows stash.Rows   // rows that the buffers hold
	Width   memory.Bytes // bytes of a row
	Tensors int          // of each group, which share the width
	Groups  int          // stashed one after the other, then restored
	Skew    float64      // how uneven the groups are: rows fall as 1/n^Skew, with Rows as their mean
	Page    memory.Bytes
	Host    bool // keep the pages in host memory
	Bump    bool // a stack instead of pages
	Line    time.Duration
	// Progress, if it is not nil, is told how much of the measurement is done.
	Progress func(done, all int)
}

// Stash is the result. Bytes is the size of the live rows of one group. A stash and its
// restore each read and write them once.
type Stash struct {
	Device    device.Info  `json:"device"`
	Rows      stash.Rows   `json:"rows"` // the mean, if the groups are skewed
	MaxRows   stash.Rows   `json:"max_rows"`
	Width     memory.Bytes `json:"width_bytes"`
	Tensors   int          `json:"tensors"`
	Groups    int          `json:"groups"`
	Skew      float64      `json:"skew"`
	Page      memory.Bytes `json:"page_bytes"`
	Tier      string       `json:"tier"`
	Store     string       `json:"store"`
	Bytes     memory.Bytes `json:"bytes"`
	PairUS    float64      `json:"pair_us"`
	CopyUS    float64      `json:"copy_pair_us"`
	GBps      float64      `json:"gbps"`
	CopyGBps  float64      `json:"copy_gbps"`
	Ratio     float64      `json:"ratio"`
	Launches  int          `json:"launches"` // a group, stash and restore together
	PoolBytes memory.Bytes `json:"pool_bytes"`
}

// stashRig holds the store, the set and the plain buffers.
type stashRig struct {
	dev    device.Device
	s      device.Stream
	store  *stash.Store
	layout []*stash.Layout // one for each row count
	set    *device.Buffer
	plain  *device.Buffer
	sums   *device.Buffer // checksums
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
	if err = r.layouts(o); err != nil {
		return r, err
	}
	cfg := stash.Config{Page: o.Page}
	var pages schedule.Pages
	for i := range o.Groups {
		pages += r.layoutOf(i).Pages(o.Page, o.counts()...)
	}
	cfg.Pages[o.tier()], cfg.Max[o.tier()] = pages, pages
	if r.store, err = stash.NewStore(dev, r.s, cfg); err != nil {
		return r, err
	}
	if r.set, err = dev.Alloc(memory.Device, r.layout[0].Size, "bench"); err != nil {
		return r, err
	}
	kind := memory.Device
	if o.Host {
		kind = memory.Host
	}
	// The buffer is as large as the pool, so that caches help both equally.
	if r.plain, err = dev.Alloc(kind, o.total(), "bench"); err != nil {
		return r, err
	}
	if r.sums, err = dev.Alloc(memory.Device, o.sums(), "bench"); err != nil {
		return r, err
	}
	r.s.Fill(r.set.All(), 1)
	randomise(r.s, r.plain.All(), 0)
	var counts []byte
	for _, n := range o.counts() {
		counts = binary.LittleEndian.AppendUint64(counts, uint64(n))
	}
	r.s.Upload(r.layout[len(r.layout)-1].Counts(r.set.All()), counts)
	for i := range o.Groups {
		rec, err := r.store.AddRecord(r.s, r.layoutOf(i), r.layoutOf(i), memory.GroupID{Name: "bench", Layer: i})
		if err != nil {
			return r, err
		}
		r.recs = append(r.recs, rec)
	}
	return r, r.s.Sync()
}

// layouts makes a layout for each row count. They differ only in the count, so all groups
// can be stashed from one set.
func (r *stashRig) layouts(o StashOptions) error {
	for i := range o.counts() {
		tensors := make([]stash.Tensor, o.Tensors)
		for k := range tensors {
			tensors[k] = stash.Tensor{Name: "tensor", Row: o.Width, MaxRows: o.MaxRows, Count: i}
		}
		l, err := stash.NewLayout(tensors...)
		if err != nil {
			return err
		}
		r.layout = append(r.layout, l)
	}
	return nil
}

// layoutOf returns the layout layoutOf group i.
func (r *stashRig) layoutOf(i int) *stash.Layout { return r.layout[i%len(r.layout)] }

// counts returns the live rows of the groups in turn. A set has room for 32 of them.
func (o StashOptions) counts() []stash.Rows {
	n := min(o.Groups, kernels.StashMaxTensors)
	if o.Skew == 0 {
		n = 1
	}
	var sum float64
	for i := range n {
		sum += math.Pow(float64(i+1), -o.Skew)
	}
	rows := make([]stash.Rows, n)
	for i := range rows {
		rows[i] = max(1, stash.Rows(math.Round(float64(o.Rows)*float64(n)*math.Pow(float64(i+1), -o.Skew)/sum)))
	}
	return rows
}

// Most returns the most rows of any group.
func (o StashOptions) Most() stash.Rows { return slices.Max(o.counts()) }

// bytes returns the live bytes of group i.
func (o StashOptions) bytes(i int) memory.Bytes {
	counts := o.counts()
	return memory.Bytes(counts[i%len(counts)]) * o.Width * memory.Bytes(o.Tensors)
}

// total returns the live bytes of all groups.
func (o StashOptions) total() (n memory.Bytes) {
	for i := range o.Groups {
		n += o.bytes(i)
	}
	return n
}

func (r *stashRig) close() (first error) {
	for _, g := range r.graphs {
		first = cmp.Or(first, g.Close())
	}
	if r.store != nil {
		r.store.Close(r.s)
	}
	for _, b := range []*device.Buffer{r.set, r.plain, r.sums} {
		if b != nil {
			r.s.Free(b)
		}
	}
	if r.s != nil {
		first = cmp.Or(first, r.s.Sync(), r.s.Close())
	}
	return first
}

// ways returns the graphs: stashes and restores, and plain copies out and back. The device
// copies, and inside device memory also the copy kernel.
func (r *stashRig) ways(o StashOptions) ([]way, error) {
	var live, away []device.Range
	for i := range o.Groups {
		at := memory.Bytes(0)
		if i > 0 {
			at = away[i-1].Off + away[i-1].Len
		}
		live = append(live, r.set.Slice(0, o.bytes(i)))
		away = append(away, r.plain.Slice(at, o.bytes(i)))
	}
	plain := func(copyNow func(dst, src device.Range)) func() {
		return func() {
			for i := range r.recs {
				copyNow(away[i], live[i])
			}
			for i := len(r.recs) - 1; i >= 0; i-- {
				copyNow(live[i], away[i])
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
		g, err := captureWork(r.s, 1, f)
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

// Footprint returns roughly the memory of both kinds that the measurement needs. It is a
// float, because a user may ask for more than an integer holds.
func (o StashOptions) Footprint() float64 {
	row := float64(o.Width) * float64(o.Tensors)
	return row * (float64(o.MaxRows) + 2*float64(o.Rows)*float64(o.Groups)) // the set, and the pool and the plain buffer
}

// measure times the graphs. Stashes, restores and plain copies leave the set as it was. If
// it has changed, one of them is wrong.
func (r *stashRig) measure(o StashOptions, ways []way) ([]time.Duration, error) {
	last := o.Groups * o.Tensors
	kernels.PutChecksum(r.s, r.sum(last, false), r.set.All())
	// Two parts last as long as a line: all ways, and then the fastest two.
	all, before := Options{Line: o.Line}, 0
	if o.Progress != nil {
		all.Progress = func(done, line int) { o.Progress(before+min(done, line), 2*line) }
	}
	times, err := all.compare(ways)
	if err != nil {
		return nil, err
	}
	before = int(o.Line.Milliseconds())
	if _, times, err = all.compareFastest(ways[0], ways[1:], times[1:]); err != nil {
		return nil, err
	}
	kernels.PutChecksum(r.s, r.sum(last, true), r.set.All())
	return times, cmp.Or(r.equal(last+1), r.sound())
}

// Stashes measures one setting, after it has proved that the bytes are restored.
func Stashes(dev device.Device, o StashOptions) (res Stash, err error) {
	r, err := newStashRig(dev, o)
	if err != nil {
		return res, err
	}
	defer func() { err = cmp.Or(err, r.close()) }()
	launches, err := r.prove(o)
	if err != nil {
		return res, err
	}
	ways, err := r.ways(o)
	if err != nil {
		return res, err
	}
	times, err := r.measure(o, ways)
	if err != nil {
		return res, err
	}
	mean := o.total() / memory.Bytes(o.Groups)
	moved := 4 * mean // read and written, out and back
	plain := times[1]
	res = Stash{
		Device: dev.Info(), Rows: o.Rows, MaxRows: o.MaxRows, Width: o.Width, Tensors: o.Tensors, Groups: o.Groups, Skew: o.Skew, Page: o.Page,
		Tier: "device", Store: "pages", Bytes: mean,
		PairUS: times[0].Seconds() * 1e6, CopyUS: plain.Seconds() * 1e6,
		GBps: gbps(moved, times[0]), CopyGBps: gbps(moved, plain), Launches: launches,
		PoolBytes: memory.Bytes(r.store.Pages(o.tier())) * o.Page,
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
