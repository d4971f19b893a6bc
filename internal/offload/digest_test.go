// This file owns the tests of the digest: whatever can change what the machine decides
// changes it, and nothing else does.

package offload

import (
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// apart tells whether each digest differs from the first, and from every other.
func apart(t *testing.T, sums map[string]uint64) {
	t.Helper()
	of := map[uint64]string{}
	for name, sum := range sums {
		if other, ok := of[sum]; ok {
			t.Errorf("%q has the digest of %q", name, other)
		}
		of[sum] = name
	}
}

// mentions fails if a struct has fields that a table of variations lacks.
func mentions(t *testing.T, of any, fields []string) {
	t.Helper()
	typ := reflect.TypeOf(of)
	for i := range typ.NumField() {
		if !slices.Contains(fields, typ.Field(i).Name) {
			t.Errorf("no variation of %v.%s is tried", typ, typ.Field(i).Name)
		}
	}
}

// SPEC S4.1: a call that differs in anything that the machine is told makes a scope
// behind it run eagerly. Times, which the machine is not told, do not.
func TestDigestOfCalls(t *testing.T) {
	sum := func(change func(op *residency.Op)) uint64 {
		op := residency.Op{Kind: residency.OpSave, ID: 3, Bytes: 64, Group: memory.GroupID{Name: "mlp", Chunk: 1, Layer: 2, Microbatch: 3}, Items: []residency.Item{{ID: 4}, {ID: 5, Stay: true}}, At: time.Second}
		change(&op)
		d := digest{}
		d.begin(residency.Config{Device: 1}, nil)
		d.op(op)
		return d.sum
	}
	same := sum(func(*residency.Op) {})
	apart(t, map[string]uint64{
		"as it is":            same,
		"Kind":                sum(func(op *residency.Op) { op.Kind = residency.OpLoad }),
		"ID":                  sum(func(op *residency.Op) { op.ID++ }),
		"Bytes":               sum(func(op *residency.Op) { op.Bytes++ }),
		"many bytes":          sum(func(op *residency.Op) { op.Bytes += 1 << 50 }),
		"the group's name":    sum(func(op *residency.Op) { op.Group.Name = "mlq" }),
		"a longer name":       sum(func(op *residency.Op) { op.Group.Name = "mlp " }),
		"the chunk":           sum(func(op *residency.Op) { op.Group.Chunk++ }),
		"the layer":           sum(func(op *residency.Op) { op.Group.Layer++ }),
		"the microbatch":      sum(func(op *residency.Op) { op.Group.Microbatch++ }),
		"an item less":        sum(func(op *residency.Op) { op.Items = op.Items[:1] }),
		"an item's storage":   sum(func(op *residency.Op) { op.Items[0].ID = 9 }),
		"an item that stays":  sum(func(op *residency.Op) { op.Items[0].Stay = true }),
		"an item that leaves": sum(func(op *residency.Op) { op.Items[1].Stay = false }),
		"items in turn":       sum(func(op *residency.Op) { slices.Reverse(op.Items) }),
	})
	mentions(t, residency.Op{}, []string{"Kind", "ID", "Bytes", "Group", "Items", "At"})
	mentions(t, residency.Item{}, []string{"ID", "Stay"})
	mentions(t, memory.GroupID{}, []string{"Name", "Chunk", "Layer", "Microbatch"})
	if sum(func(op *residency.Op) { op.At = 0 }) != same {
		t.Error("the time of a call counts")
	}
}

// SPEC S4.1: the same for plans and limits.
func TestDigestOfPlans(t *testing.T) {
	g := func(i int) memory.GroupID { return memory.GroupID{Name: "attn", Layer: i} }
	order := func(loads ...int) *schedule.Schedule {
		s := &schedule.Schedule{}
		for i := range 3 {
			s.Save(g(i))
		}
		for _, i := range loads {
			s.Load(g(i))
		}
		return s
	}
	sum := func(change func(p *residency.Plan, c *residency.Config)) uint64 {
		p := &residency.Plan{
			Schedule: order(2, 1, 0), Offload: map[memory.GroupID]bool{g(0): true, g(1): true, g(2): false},
			Prefetch: [][]memory.GroupID{2: {g(1), g(0)}, 3: nil}, Window: 2, Device: 100,
		}
		c := residency.Config{Device: 1, Host: 2, Align: 3, Window: 4, Cap: 5, Least: 6}
		change(p, &c)
		d := digest{}
		d.begin(c, p)
		return d.sum
	}
	type (
		plan   = residency.Plan
		config = residency.Config
	)
	same := sum(func(*plan, *config) {})
	apart(t, map[string]uint64{
		"as it is":                 same,
		"Schedule":                 sum(func(p *plan, _ *config) { p.Schedule = order(1, 2, 0) }),
		"no Schedule":              sum(func(p *plan, _ *config) { p.Schedule = nil }),
		"Offload":                  sum(func(p *plan, _ *config) { p.Offload[g(2)] = true }),
		"one less":                 sum(func(p *plan, _ *config) { p.Offload[g(0)] = false }),
		"another":                  sum(func(p *plan, _ *config) { p.Offload[g(0)], p.Offload[g(2)] = false, true }),
		"Prefetch":                 sum(func(p *plan, _ *config) { p.Prefetch[3] = []memory.GroupID{g(0)} }),
		"prefetched in turn":       sum(func(p *plan, _ *config) { slices.Reverse(p.Prefetch[2]) }),
		"Window":                   sum(func(p *plan, _ *config) { p.Window++ }),
		"Device":                   sum(func(p *plan, _ *config) { p.Device++ }),
		"Strict":                   sum(func(p *plan, _ *config) { p.Strict = true }),
		"the limit":                sum(func(_ *plan, c *config) { c.Device++ }),
		"the limit of the host":    sum(func(_ *plan, c *config) { c.Host++ }),
		"the machine's window":     sum(func(_ *plan, c *config) { c.Window++ }),
		"the cap":                  sum(func(_ *plan, c *config) { c.Cap++ }),
		"the least that may leave": sum(func(_ *plan, c *config) { c.Least++ }),
	})
	mentions(t, plan{}, []string{"Schedule", "Offload", "Prefetch", "Window", "Device", "Strict"})
	// Align and Borrowed are those of the manager, and never change.
	mentions(t, config{}, []string{"Device", "Host", "Window", "Cap", "Least", "Align", "Borrowed"})
	if sum(func(p *plan, _ *config) { delete(p.Offload, g(2)); p.Prefetch = p.Prefetch[:3] }) != same {
		t.Error("what a plan says without need counts")
	}
}

// A plan's sum is known after its first step, and another plan has another.
func TestDigestOfPlansInTurn(t *testing.T) {
	plans := []*residency.Plan{nil, {Window: 1}, {Window: 2}, {Window: 1}}
	var d digest
	sum := func(p *residency.Plan) uint64 {
		d.begin(residency.Config{}, p)
		return d.sum
	}
	first := make([]uint64, len(plans))
	for i, p := range plans {
		first[i] = sum(p)
	}
	for _, i := range []int{3, 0, 2, 2, 1, 0, 1} {
		if sum(plans[i]) != first[i] {
			t.Errorf("plan %d has another digest than before", i)
		}
	}
	if first[0] == first[1] || first[1] == first[2] || first[1] != first[3] {
		t.Errorf("digests %v", first)
	}
}
