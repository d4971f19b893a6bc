// This file owns the tests of limits: the largest and smallest sizes that are allowed, and
// those next to them that are not.

package stash

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

func TestLimitsOfLayouts(t *testing.T) {
	tensors := func(n int, t Tensor) []Tensor {
		all := make([]Tensor, n)
		for i := range all {
			all[i] = t
		}
		return all
	}
	one := Tensor{Name: "x", Row: 1, MaxRows: 1}
	for name, x := range map[string]struct {
		tensors []Tensor
		ok      bool
	}{
		"none":                {nil, false},
		"one":                 {tensors(1, one), true},
		"as many as may be":   {tensors(kernels.StashMaxTensors, one), true},
		"one too many":        {tensors(kernels.StashMaxTensors+1, one), false},
		"rows without bytes":  {tensors(1, Tensor{Row: 0, MaxRows: 1}), false},
		"negative bytes":      {tensors(1, Tensor{Row: -1, MaxRows: 1}), false},
		"no rows":             {tensors(1, Tensor{Row: 1, MaxRows: 0}), false},
		"negative rows":       {tensors(1, Tensor{Row: 1, MaxRows: -1}), false},
		"the first count":     {tensors(1, Tensor{Row: 1, MaxRows: 1, Count: 0}), true},
		"a negative count":    {tensors(1, Tensor{Row: 1, MaxRows: 1, Count: -1}), false},
		"the last count":      {tensors(1, Tensor{Row: 1, MaxRows: 1, Count: kernels.StashMaxTensors - 1}), true},
		"a count behind that": {tensors(1, Tensor{Row: 1, MaxRows: 1, Count: kernels.StashMaxTensors}), false},
		"1 TiB":               {tensors(1, Tensor{Row: 1 << 20, MaxRows: 1 << 20}), true},
		"a row more":          {tensors(1, Tensor{Row: 1 << 20, MaxRows: 1<<20 + 1}), false},
		"1 TiB in bytes":      {tensors(1, Tensor{Row: 1, MaxRows: 1 << 40}), true},
	} {
		if _, err := NewLayout(x.tensors...); (err == nil) != x.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
	l, err := NewLayout(Tensor{Name: "x", Row: 300, MaxRows: 2, Count: kernels.StashMaxTensors - 1}, Tensor{Name: "y", Row: device.Align, MaxRows: 1})
	if err != nil {
		t.Fatal(err)
	}
	set := device.Range{Len: l.Size}
	if c, x, y := l.Counts(set), l.Tensor(set, 0), l.Tensor(set, 1); c.Off != 0 || c.Len != 8*kernels.StashMaxTensors || x.Off != device.Align || x.Len != 600 ||
		y.Off != x.Off+(600+device.Align-1)/device.Align*device.Align || y.Len != device.Align || l.Size != y.Off+device.Align {
		t.Errorf("the counts are %v, the tensors %v and %v of %v", c, x, y, l.Size)
	}
	rows := make([]Rows, kernels.StashMaxTensors)
	rows[0], rows[kernels.StashMaxTensors-1] = 1, 1
	if n, most := l.Pages(4096, rows...), l.maxPages(4096); n != 2 || most != 2 {
		t.Errorf("%d pages of at most %d", n, most)
	}
}

func TestLimitsOfStores(t *testing.T) {
	pages := func(n, most schedule.Pages) Config {
		return Config{Pages: [Tiers]schedule.Pages{n, 0}, Max: [Tiers]schedule.Pages{most, 0}}
	}
	for name, x := range map[string]struct {
		c  Config
		ok bool
	}{
		"nothing":               {Config{}, true},
		"the smallest page":     {Config{Page: 4 * memory.KiB}, true},
		"a smaller page":        {Config{Page: 2 * memory.KiB}, false},
		"the largest page":      {Config{Page: memory.GiB}, true},
		"a larger page":         {Config{Page: 2 * memory.GiB}, false},
		"no power of two":       {Config{Page: 12 * memory.KiB}, false},
		"one byte of records":   {Config{Records: 1}, true},
		"negative records":      {Config{Records: -1}, false},
		"negative pages":        {pages(-1, 1), false},
		"all pages at once":     {pages(3, 3), true},
		"more than may be":      {pages(4, 3), false},
		"as many as may be":     {pages(0, 1<<31), true},
		"one page too many":     {pages(0, 1<<31+1), false},
		"in the other tier too": {Config{Max: [Tiers]schedule.Pages{0, 1<<31 + 1}}, false},
	} {
		if err := x.c.check(); (err == nil) != x.ok {
			t.Errorf("%s: %v", name, err)
		}
		if x.ok && (x.c.Page == 0 || x.c.Records == 0) {
			t.Errorf("%s: %+v has no default", name, x.c)
		}
	}
	for n, want := range map[schedule.Pages]uint64{0: 1, 1: 1, 2: 2, 3: 4, 4: 4, 5: 8} {
		if got := ringLength(n); got != want {
			t.Errorf("a ring for %d pages has %d places, want %d", n, got, want)
		}
	}
}

// Records may fill the memory that is reserved for them to the byte. A tier may grow to its
// maximum and no further, and never gets smaller by that.
func TestLimitsOfRecords(t *testing.T) {
	l, err := NewLayout(Tensor{Name: "x", Row: 4096, MaxRows: 4})
	if err != nil {
		t.Fatal(err)
	}
	size := align(kernels.StashRecordSize(1, 4))
	r := newRig(t, openCPU(t), Config{Page: 4 * memory.KiB, Pages: [Tiers]schedule.Pages{2, 0}, Max: [Tiers]schedule.Pages{4, 0}, Records: 3 * size})
	for i := range 3 {
		if rec := r.record(l); rec.id != i || rec.mem.Off != memory.Bytes(i)*size || rec.maxPages != 4 {
			t.Errorf("record %d: %+v", i, rec)
		}
	}
	if _, err := r.store.AddRecord(r.s, l, l, memory.GroupID{}); err == nil || !strings.Contains(err.Error(), "stash: 4 groups of up to 4 pages need more than") {
		t.Errorf("a fourth record: %v", err)
	}
	// The first tensor of a group of eight decides between 2^31 pages and one fewer.
	for first, want := range map[Rows]string{
		1 << 28:   fmt.Sprintf("may need %d pages, which is too many", 1<<31),
		1<<28 - 1: fmt.Sprintf("groups of up to %d pages need more than", 1<<31-1),
	} {
		huge := []Tensor{{Name: "x", Row: 4096, MaxRows: first}}
		for range 7 {
			huge = append(huge, Tensor{Name: "x", Row: 4096, MaxRows: 1 << 28})
		}
		l := r.layout(huge...)
		if _, err := r.store.AddRecord(r.s, l, l, memory.GroupID{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want words with %q", err, want)
		}
	}
	for _, x := range []struct {
		pages, want schedule.Pages
		ok          bool
	}{{1, 2, true}, {2, 2, true}, {3, 3, true}, {4, 4, true}, {5, 4, false}} {
		if err := r.store.Grow(r.s, Device, x.pages); (err == nil) != x.ok || r.store.Pages(Device) != x.want {
			t.Errorf("grown to %d pages it has %d: %v", x.pages, r.store.Pages(Device), err)
		}
	}
	if n := r.store.Pool(Device).Len; n != 4*4*memory.KiB {
		t.Errorf("the pool has %v", n)
	}
	for _, x := range []struct{ pages, want schedule.Pages }{{3, 3}, {3, 3}, {9, 4}, {0, 0}, {2, 2}} {
		if err := r.store.Resize(r.s, Device, x.pages); err != nil || r.store.Pages(Device) != x.want || r.store.Max(Device) != x.want || r.store.Pool(Device).Len != memory.Bytes(x.want)*4*memory.KiB {
			t.Errorf("resized to %d pages it has %d of %d in %v: %v", x.pages, r.store.Pages(Device), r.store.Max(Device), r.store.Pool(Device).Len, err)
		}
	}
	if g := r.store.group(3); g != (memory.GroupID{}) {
		t.Errorf("a record that is not there belongs to %v", g)
	}
}

// A berth is given memory for the counted rows and some to spare. It keeps its size while
// half of the spare rows are left. There may be more berths than notes fit on a page.
func TestRoomOfBerths(t *testing.T) {
	l := libraryOn(t, openCPU(t), 0.5)
	s := rowShape{64, 1000}
	mem, put := l.putter(t, s)
	b := put(10)
	if b.room != 501 {
		t.Errorf("a new berth has room for %d rows", b.room)
	}
	l.h.Begin()
	for _, x := range []struct{ rows, room int64 }{
		{486, 501}, // 486 + 486/32 = 501
		{487, 518}, // 487 + 487/16 + 1
		{487, 518},
		{518, 551},
		{1000, 1000},
		{1000, 1000},
		{0, 1000},
	} {
		put(x.rows)
		missed, err := l.h.Settle(func(*Berth) bool { return false })
		if err != nil || int64(b.room) != x.room || (missed != Missed{}) != (x.rows == 1000 && missed.Had == 551*64) {
			t.Errorf("%d rows: room for %d, want %d; missed %+v, %v", x.rows, b.room, x.room, missed, err)
		}
		l.h.Begin()
	}
	s = rowShape{8, 1}
	small := mem.Slice(0, 8)
	for range 300 {
		if _, err := l.h.Save(small, l.count.All(), s.row, s.limit); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(l.h.all); n != 301 {
		t.Errorf("%d berths", n)
	}
	for name, f := range map[string]func(){
		"too short":        func() { _, _ = l.h.Save(mem.Slice(0, 7), l.count.All(), 8, 1) },
		"a count too long": func() { _, _ = l.h.Save(mem.Slice(0, 8), mem.Slice(0, 16), 8, 1) },
	} {
		func() {
			defer func() {
				if got := fmt.Sprint(recover()); !strings.HasPrefix(got, "stash: a tensor of") {
					t.Errorf("%s: got the panic %q", name, got)
				}
			}()
			f()
		}()
	}
	l.compute.Free(mem)
}

// A workspace has at least one set and no negative limit. Sets grow by an eighth more than
// was asked for, up to the limit.
func TestLimitsOfWorkspaces(t *testing.T) {
	c := roomy(PagesOnly)
	c.MoreSets = 3
	r := newSmall(t, openCPU(t), c)
	tensor := Tensor{Name: "x", Row: 4096, MaxRows: 16}
	for _, x := range []struct {
		sets  int
		limit Rows
	}{{0, 0}, {-1, 0}, {1, -1}} {
		if _, err := r.m.NewWorkspace("bad", x.sets, x.limit, tensor); err == nil {
			t.Errorf("%d sets and a limit of %d rows are accepted", x.sets, x.limit)
		}
	}
	w := r.space("a", 100, 16)
	for asked, want := range map[Rows]Rows{0: 0, 15: 0, 16: 0, 17: 19, 80: 90, 88: 99, 96: 100, 100: 100} {
		l, err := w.larger([]Rows{asked})
		if err != nil {
			t.Fatal(err)
		}
		if (l == nil) != (want == 0) || l != nil && l.Tensors[0].MaxRows != want {
			t.Errorf("%d rows: %+v, want room for %d", asked, l, want)
		}
	}
	if _, err := w.larger([]Rows{101}); err == nil || !strings.Contains(err.Error(), "needs 101 rows and its limit is 100") {
		t.Errorf("101 rows: %v", err)
	}
	two, err := r.m.NewWorkspace("b", 2, 0, tensor)
	if err != nil {
		t.Fatal(err)
	}
	size, wide := w.layout.Size, w.widest.Size
	spaces, pages := r.m.Most()
	if spaces != wide+2*size || pages != 256*4*memory.KiB {
		t.Errorf("at most %v of sets and %v of pages", spaces, pages)
	}
	if spaces, pages = r.m.Held(); spaces != 3*size || pages != 256*4*memory.KiB {
		t.Errorf("%v of sets and %v of pages are held", spaces, pages)
	}
	if got := fmt.Sprint(r.m.Sets(), r.m.Names()); got != "[1 2] [a b]" {
		t.Errorf("the workspaces are %s", got)
	}
	if most, added, each := r.m.MoreSets(); most != 3 || added != 0 || each != wide+size {
		t.Errorf("%d of %d sets are added, of %v each", added, most, each)
	}
	// The set that was idle for the longest time is leased next.
	r.m.Begin(memory.Key{})
	var used []*slot
	for i := range 4 {
		x := two.Forward(memory.GroupID{Layer: i})
		used = append(used, x.slot)
		x.Drop()
	}
	r.m.Finish()
	if used[0] == used[1] || used[0] != used[2] || used[1] != used[3] {
		t.Error("the sets of a workspace are not used in turn")
	}
}

func TestLimitsOfManagers(t *testing.T) {
	dev := openCPU(t)
	compute, err := dev.NewStream("compute")
	if err != nil {
		t.Fatal(err)
	}
	for name, x := range map[string]struct {
		change func(c *ManagerConfig)
		ok     bool
	}{
		"nothing":         {func(*ManagerConfig) {}, true},
		"a negative load": {func(c *ManagerConfig) { c.Ahead = -1 }, false},
		"the last mode":   {func(c *ManagerConfig) { c.Mode = BumpOnly }, true},
		"no such mode":    {func(c *ManagerConfig) { c.Mode = BumpOnly + 1 }, false},
		"no host store":   {func(c *ManagerConfig) { c.HostMax, c.HostPages = 4, 5 }, false},
	} {
		c := roomy(Auto)
		x.change(&c)
		m, err := NewManager(dev, compute, c)
		if (err == nil) != x.ok {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil {
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	for ahead, want := range map[int]int{0: 1, 1: 1, 3: 3} {
		c := roomy(Auto)
		c.Ahead, c.HostMax, c.HostPages, c.Tables = ahead, 8, 2, memory.MiB
		m, err := NewManager(dev, compute, c)
		if err != nil {
			t.Fatal(err)
		}
		if m.Ahead() != want || !m.Placeable() {
			t.Errorf("%d loads ahead became %d, placeable is %v", ahead, m.Ahead(), m.Placeable())
		}
		control := kernels.StashControlBytes
		if got := m.Unseen(); got != memory.MiB-2*control-2*align(control) {
			t.Errorf("%v of page tables are not seen yet", got)
		}
		m.cfg.Tables = 1
		if got := m.Unseen(); got != 0 {
			t.Errorf("%v of page tables are not seen yet, and none is expected", got)
		}
		if err := m.Expect(1000); err != nil || m.store.Pages(Host) != 256 {
			t.Errorf("the host tier has %d pages: %v", m.store.Pages(Host), err)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := compute.Close(); err != nil {
		t.Error(err)
	}
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
}

// Check finds pages that two records hold, that nobody holds, that are both free and held,
// and that do not exist.
func TestCheckFindsWrongPages(t *testing.T) {
	r := newRig(t, openCPU(t), Config{Page: 4 * memory.KiB, Pages: [Tiers]schedule.Pages{3, 5}, Max: [Tiers]schedule.Pages{4, 8}})
	l := r.layout(Tensor{Name: "x", Row: 4096, MaxRows: 4})
	set := r.set(l)
	a, b := r.record(l), r.record(l)
	find := func(want string, live ...*Record) {
		t.Helper()
		if err := r.store.Check(r.s, live...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	stash := func(bump bool) {
		r.store.Reset(r.s, bump)
		r.s.Upload(set, contents(l, 1, 2))
		r.store.Stash(r.s, a, set) // two device pages
		r.store.Stash(r.s, b, set) // one device page, one host page
		r.check(a, b)
	}
	stash(false)
	find("page 0 of the device tier is held by record 0 and by record 0", a, a)
	find("device tier: tail 3 - head 3 + live 2 != capacity 3", a)
	find("device tier: tail 3 - head 3 + live 1 != capacity 3", b)
	entry := func(tier, i int, page uint32) {
		r.s.Upload(r.store.ring.Slice(r.store.rings[tier]+memory.Bytes(4*i), 4), asBytes(&page))
	}
	entry(Host, 1, 0)
	find("page 0 of the host tier is free and also held by \"record 1\"", a, b)
	entry(Host, 1, 5)
	find("page 5 of the host tier is free and also held by \"\", or beyond 5", a, b)
	entry(Host, 1, 2)
	find("page 2 of the host tier is free and also held by \"the free list\"", a, b)
	entry(Host, 1, 1)
	r.check(a, b)
	stash(true)
	find("the stack of the device tier is 3 pages high, and 2 pages are live", a)
}
