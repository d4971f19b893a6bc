// This file owns the tensors that scopes return: those of a replay are used like those of
// the step that was captured.

package engine

import (
	"errors"
	"maps"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
)

// A scope makes a tensor, and a group outside saves it and frees it before its end. The
// group then holds it until the backward pass, in the step that is recorded, in the
// capture and in every replay.
func TestGroupsSaveWhatScopesReturn(t *testing.T) {
	dev := openCPU(t)
	compute, err := dev.NewStream("compute")
	if err != nil {
		t.Fatal(err)
	}
	r, err := Open(Config{Device: dev, Compute: compute, Scopes: memory.ScopesOf(memory.Attn), ByHand: hand("moe_act"), Links: testLinks})
	if err != nil {
		t.Fatal(err)
	}
	const n = 4096
	g := memory.GroupID{Name: "moe_act"}
	for step := range 6 {
		value := byte(step + 1)
		got := make([]byte, n)
		err := r.Step(memory.Key{Microbatches: 1}, func(s *Step) error {
			out, err := s.Scope(memory.Attn, Pass{}, func() ([]*Tensor, error) {
				x, err := s.New(n)
				if err == nil {
					compute.Fill(x.Range(), 0x55)
				}
				return []*Tensor{x}, err
			})
			if err != nil {
				return err
			}
			group := s.BeginGroup(g)
			compute.Fill(out[0].Range(), value)
			group.Save(out[0])
			out[0].Free() // the group still holds it
			if len(group.freed) != 1 {
				t.Errorf("step %d: a tensor that the group saved was freed at once", step)
			}
			if err := group.End(); err != nil {
				return err
			}
			other, err := s.New(n) // in whatever memory is free
			if err != nil {
				return err
			}
			compute.Fill(other.Range(), 0xee)
			l, err := s.Load(g)
			if err != nil {
				return err
			}
			err = compute.Download(got, l.Range(0))
			l.Done()
			other.Free()
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		for i := range got {
			if got[i] != value {
				t.Fatalf("step %d: byte %d is %#x, want %#x", step, i, got[i], value)
			}
		}
	}
	if c := r.Summary(memory.Key{Microbatches: 1}).Graphs; c.Replays == 0 {
		t.Errorf("nothing was replayed: %+v", c)
	}
	if err := errors.Join(r.Close(), compute.Close(), dev.Close()); err != nil {
		t.Error(err)
	}
}

// A group that was recomputed and is done cannot be loaded again, like any other: it is not
// recomputed a second time.
func TestRecomputedGroupsAreDoneOnce(t *testing.T) {
	dev := openCPU(t)
	compute, err := dev.NewStream("compute")
	if err != nil {
		t.Fatal(err)
	}
	g := memory.GroupID{Name: "mlp"}
	r, err := Open(Config{Device: dev, Compute: compute, Policy: memory.Policy{g.Unit(): memory.Recompute}, Links: testLinks})
	if err != nil {
		t.Fatal(err)
	}
	calls, refused := 0, false
	err = r.Step(memory.Key{Microbatches: 1}, func(s *Step) error {
		err := s.Run(g, func(to *Group) error {
			calls++
			x, err := s.New(512)
			if err != nil {
				return err
			}
			compute.Fill(x.Range(), 1)
			to.Save(x)
			x.Free()
			return nil
		})
		if err != nil {
			return err
		}
		l, err := s.Load(g)
		if err != nil {
			return err
		}
		l.Done()
		defer func() { refused = recover() != nil }()
		_, err = s.Load(g)
		return err
	})
	if err != nil || calls != 2 || !refused {
		t.Errorf("%v; the forward pass ran %d times, and the second load was refused: %v", err, calls, refused)
	}
	if err := errors.Join(r.Close(), compute.Close(), dev.Close()); err != nil {
		t.Error(err)
	}
}

// A policy belongs to the caller, who may have given it to other ranks as well: a decision has one of its
// own.
func TestDecisionsHaveTheirOwnPolicy(t *testing.T) {
	dev := openCPU(t)
	compute, err := dev.NewStream("compute")
	if err != nil {
		t.Fatal(err)
	}
	a, b := memory.GroupID{Name: "mlp"}, memory.GroupID{Name: "core_attn"}
	given := memory.Policy{a.Unit(): memory.Recompute, b.Unit(): memory.Offload}
	r, err := Open(Config{Device: dev, Compute: compute, Policy: given, Links: testLinks})
	if err != nil {
		t.Fatal(err)
	}
	key := memory.Key{Microbatches: 1}
	err = r.Step(key, func(s *Step) error {
		for _, g := range []memory.GroupID{a, b} {
			err := s.Run(g, func(to *Group) error {
				x, err := s.New(512)
				if err == nil {
					compute.Fill(x.Range(), 1)
					to.Save(x)
					x.Free()
				}
				return err
			})
			if err != nil {
				return err
			}
		}
		for _, g := range []memory.GroupID{b, a} {
			l, err := s.Load(g)
			if err != nil {
				return err
			}
			l.Done()
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	d := r.Decision(key)
	if !maps.Equal(d.Policy, given) {
		t.Errorf("the policy is %v, and %v was given", d.Policy, given)
	}
	clear(d.Policy)
	if len(given) != 2 {
		t.Error("the decision and the caller have the same policy")
	}
	if err := errors.Join(r.Close(), compute.Close(), dev.Close()); err != nil {
		t.Error(err)
	}
}

// A recomputed group whose forward pass is replayed cannot be loaded outside of a captured backward
// pass: that is an error which says what to do, and the next step is as good as the first.
func TestReplayedForwardWithoutItsBackward(t *testing.T) {
	dev := openCPU(t)
	compute, err := dev.NewStream("compute")
	if err != nil {
		t.Fatal(err)
	}
	g := memory.GroupID{Name: "core_attn"}
	r, err := Open(Config{Device: dev, Compute: compute, Policy: memory.Policy{g.Unit(): memory.Recompute}, Scopes: memory.ScopesOf(memory.Attn), Links: testLinks})
	if err != nil {
		t.Fatal(err)
	}
	step := func(captured bool) error {
		return r.Step(memory.Key{Microbatches: 1}, func(s *Step) error {
			_, err := s.Scope(memory.Attn, Pass{}, func() ([]*Tensor, error) {
				return nil, s.Run(g, func(to *Group) error {
					x, err := s.New(512)
					if err != nil {
						return err
					}
					compute.Fill(x.Range(), 1)
					to.Save(x)
					x.Free()
					return nil
				})
			})
			if err != nil {
				return err
			}
			load := func() ([]*Tensor, error) {
				l, err := s.Load(g)
				if err == nil {
					l.Done()
				}
				return nil, err
			}
			if captured {
				_, err = s.Scope(memory.Attn, Pass{Backward: true}, load)
				return err
			}
			_, err = load()
			return err
		})
	}
	replays := func() int { return r.Summary(memory.Key{Microbatches: 1}).Graphs.Replays }
	for range 12 {
		if err := step(true); err != nil {
			t.Fatal(err)
		}
	}
	if replays() == 0 {
		t.Fatal("nothing was replayed")
	}
	if err := step(false); err == nil || !strings.HasSuffix(err.Error(), "is recomputed, and its forward pass was replayed while its backward pass could not be; run the step again") {
		t.Errorf("the backward pass was issued: %v", err)
	}
	for range 4 {
		if err := step(true); err != nil {
			t.Error(err)
		}
	}
	if err := errors.Join(r.Close(), compute.Close(), dev.Close()); err != nil {
		t.Error(err)
	}
}
