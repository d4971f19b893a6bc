// This file tests how long a step holds what its groups save.

package engine

import (
	"errors"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/memory"
)

// What a forward pass saves and frees is held while the policy keeps it, and no longer: from the forward pass
// on if it is kept, from the load on if it is recomputed, until Done in both cases.
func TestHowLongSavedTensorsAreHeld(t *testing.T) {
	const n = 4096
	for choice, want := range map[memory.Choice][3]memory.Bytes{memory.Keep: {n, n, 0}, memory.Recompute: {0, n, 0}} {
		dev := openCPU(t)
		compute, err := dev.NewStream("compute")
		if err != nil {
			t.Fatal(err)
		}
		id := memory.GroupID{Name: "moe_act"}
		r, err := Open(Config{Device: dev, Compute: compute, Links: testLinks, Policy: memory.Policy{id.Unit(): choice}})
		if err != nil {
			t.Fatal(err)
		}
		for step := range 3 {
			err := r.Step(memory.Key{Microbatches: 1}, func(s *Step) error {
				err := s.Run(id, func(g *Group) error {
					x, err := s.New(n)
					if err != nil {
						return err
					}
					y, err := s.New(n)
					if err != nil {
						return err
					}
					compute.Fill(x.Range(), 1)
					compute.Fill(y.Range(), 2)
					g.Save(y)
					y.Free()
					x.Free()
					return nil
				})
				got := [3]memory.Bytes{s.SavedBytes()}
				l, e := s.Load(id)
				if err = errors.Join(err, e); err != nil {
					return err
				}
				got[1] = s.SavedBytes()
				l.Done()
				if got[2] = s.SavedBytes(); got != want {
					t.Errorf("%v, step %d: %v are held after the forward pass, the load and Done; want %v", choice, step, got, want)
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		}
		if err := errors.Join(r.Close(), compute.Close(), dev.Close()); err != nil {
			t.Error(err)
		}
	}
}

// A group that another one's second pass needs stays until its own backward pass is done, whichever of the two loads it
// first, and is let go then. A view lies where it says in its storage, also a view of a view.
func TestAGroupStaysForItsOwnBackwardPass(t *testing.T) {
	const n = 4096
	for _, first := range []string{"input", "output"} {
		dev := openCPU(t)
		compute, err := dev.NewStream("compute")
		if err != nil {
			t.Fatal(err)
		}
		input, output := memory.GroupID{Name: "layernorm"}, memory.GroupID{Name: "moe_act"}
		r, err := Open(Config{Device: dev, Compute: compute, Links: testLinks, Policy: memory.Policy{output.Unit(): memory.Recompute}})
		if err != nil {
			t.Fatal(err)
		}
		save := func(s *Step, g *Group) error {
			x, err := s.New(n)
			if err != nil {
				return err
			}
			if v := x.View(1000, 4, []int{10}, nil).View(100, 1, []int{20}, nil); v.Range().Off != x.Range().Off+100 || v.Range().Len != 20 {
				t.Errorf("a view of a view is %v of %v", v.Range(), x.Range())
			}
			compute.Fill(x.Range(), 1)
			g.Save(x)
			x.Free()
			return nil
		}
		var held []memory.Bytes
		err = r.Step(memory.Key{Microbatches: 1}, func(s *Step) error {
			err := s.Run(input, func(g *Group) error { return save(s, g) })
			err = errors.Join(err, s.Run(output, func(g *Group) error {
				if g.Recomputing() {
					l, err := s.Load(input)
					if err != nil {
						return err
					}
					defer l.Done()
				}
				return save(s, g)
			}))
			if err != nil {
				return err
			}
			held, err = loadBoth(s, input, output, first == "input")
			return err
		})
		if want := map[string][]memory.Bytes{"input": {n, 2 * n, n, 0}, "output": {2 * n, n, n, 0}}[first]; !slices.Equal(held, want) {
			t.Errorf("the %s first: %v are held, want %v", first, held, want)
		}
		if err := errors.Join(err, r.Close(), compute.Close(), dev.Close()); err != nil {
			t.Error(err)
		}
	}
}

// loadBoth loads two groups, of which the second needs the first, and returns what is held after each load and
// each Done. The first one is loaded before the other and done behind it, or the other way round.
func loadBoth(s *Step, input, output memory.GroupID, first bool) (held []memory.Bytes, err error) {
	var open [2]*Loaded
	load := func(i int, id memory.GroupID) {
		if err == nil {
			open[i], err = s.Load(id)
			held = append(held, s.SavedBytes())
		}
	}
	done := func(i int) {
		if err == nil {
			open[i].Done()
			held = append(held, s.SavedBytes())
		}
	}
	if first {
		load(0, input)
		load(1, output)
		done(1)
		done(0)
		return held, err
	}
	load(1, output)
	done(1)
	load(0, input)
	done(0)
	return held, err
}
