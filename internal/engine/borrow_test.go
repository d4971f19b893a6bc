// This file owns the tests of steps between Begin and End, whose memory is the caller's.

package engine

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/offload"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
)

// borrower is a loop without a body, whose memory is its own.
type borrower struct {
	dev     device.Device
	compute device.Stream
	r       *Runtime
	lent    []*device.Buffer
	to      *device.Buffer // what was loaded, group by group
}

func newBorrower(t *testing.T, cfg Config) *borrower {
	t.Helper()
	b := &borrower{}
	var err error
	if b.dev, err = cpu.Open(cpu.Options{}); err != nil {
		t.Fatal(err)
	}
	if b.compute, err = b.dev.NewStream("compute"); err != nil {
		t.Fatal(err)
	}
	cfg.Device, cfg.Compute, cfg.NoRecompute, cfg.Links = b.dev, b.compute, true, memory.Links{Out: 1e9, In: 1e9, Both: 1e9}
	cfg.ProvideMemory = func(s *offload.Storage) (device.Range, error) {
		m, err := b.dev.Alloc(memory.Device, s.Size(), "lent")
		if err != nil {
			return device.Range{}, err
		}
		b.lent = append(b.lent, m)
		return m.All(), nil
	}
	if b.to, err = b.dev.Alloc(memory.Device, 16*4096, "result"); err != nil {
		t.Fatal(err)
	}
	b.lent = append(b.lent, b.to)
	if b.r, err = Open(cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		err := b.r.Close()
		for _, m := range b.lent {
			b.compute.Free(m)
		}
		if err := errors.Join(err, b.compute.Close(), b.dev.Close()); err != nil {
			t.Error(err)
		}
	})
	return b
}

// step saves so many groups of 4 KiB, each of one byte, loads them in the reverse order,
// and looks at them; the result is how many times memory was left.
func (b *borrower) step(t *testing.T, groups int, failed error) (left int, err error) {
	t.Helper()
	left, err = b.issue(t, groups, failed)
	b.look(t, groups)
	return left, err
}

// replay is a step that is captured, and then replayed.
func (b *borrower) replay(t *testing.T, groups int) (left int, err error) {
	t.Helper()
	b.compute.BeginCapture()
	left, err = b.issue(t, groups, nil)
	graph, failed := b.compute.EndCapture()
	if err = errors.Join(err, failed); err != nil {
		return left, err
	}
	for range 2 {
		b.compute.Replay(graph)
		b.look(t, groups)
	}
	return left, graph.Close()
}

// look compares what was loaded with what was saved, and forgets it.
func (b *borrower) look(t *testing.T, groups int) {
	t.Helper()
	got := make([]byte, groups*4096)
	if err := b.compute.Download(got, b.to.Slice(0, memory.Bytes(len(got)))); err != nil {
		t.Fatal(err)
	}
	for i := range groups {
		if !bytes.Equal(got[i*4096:][:4096], bytes.Repeat([]byte{byte(i + 1)}, 4096)) {
			t.Errorf("group %d is not what was saved", i)
		}
	}
	b.compute.Fill(b.to.All(), 0)
}

// issue issues a step.
func (b *borrower) issue(t *testing.T, groups int, failed error) (left int, err error) {
	t.Helper()
	s, err := b.r.Begin(memory.Key{})
	if err != nil {
		t.Fatal(err)
	}
	body := func() error {
		for i := range groups {
			m, err := b.dev.Alloc(memory.Device, 4096, "activation")
			if err != nil {
				return err
			}
			b.lent = append(b.lent, m)
			b.compute.Fill(m.All(), byte(i+1))
			x, err := s.Borrow(m.All(), func() { left++; b.compute.Fill(m.All(), 0) })
			if err != nil {
				return err
			}
			g := s.BeginGroup(memory.GroupID{Name: "mlp", Layer: i})
			g.Save(x)
			if err := g.End(); err != nil {
				return err
			}
			x.Free()
			if y := s.TensorOf(x.Storage); y.Bytes() != 4096 {
				t.Errorf("%v bytes again", y.Bytes())
			}
		}
		for i := groups - 1; i >= 0; i-- {
			l, err := s.Load(memory.GroupID{Name: "mlp", Layer: i})
			if err != nil {
				return err
			}
			b.compute.Copy(b.to.Slice(memory.Bytes(i)*4096, 4096), l.Range(0))
			l.Done()
		}
		return failed
	}
	err = s.End(body())
	return left, err
}

// SPEC S6.4: between Begin and End a step is what it is in Step: the first is recorded,
// later ones follow what was decided, by name or for a budget; one that is ended with an
// error gives that back, and nothing is learned from it.
func TestBeginAndEnd(t *testing.T) {
	const groups = 5
	why := errors.New("given up")
	for name, x := range map[string]struct {
		cfg   Config
		moved bool
	}{
		"nothing": {Config{}, false},
		"by name": {Config{GroupChoices: map[string]memory.Choice{"mlp": memory.Offload}}, true},
		"others":  {Config{GroupChoices: map[string]memory.Choice{"attn": memory.Offload}}, false},
		"small":   {Config{GroupChoices: map[string]memory.Choice{"mlp": memory.Offload}, MinBytes: 5000}, false},
		"limit":   {Config{SavedLimit: 3 * 4096}, true},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBorrower(t, x.cfg)
			if _, err := b.step(t, groups, why); !errors.Is(err, why) || b.r.Decision(memory.Key{}) != nil {
				t.Errorf("%v, %+v", err, b.r.Decision(memory.Key{}))
			}
			for i := range 4 {
				d := b.r.Decision(memory.Key{}) // a step whose times are final changes it for the next ones
				left, err := b.step(t, groups, nil)
				if err != nil {
					t.Fatal(err)
				}
				st := b.r.off.Last()
				if left != groups+st.In || x.moved != (st.Out > 0) || b.r.Decision(memory.Key{}) == nil {
					t.Errorf("step %d: left %d times, %+v", i, left, st.Counts)
				}
				// Copies that the host sees to be over are let go before there is no room. That
				// takes no more memory than was forecast; what is gone has to be copied in, and
				// out again if it leaves once more. What leaves device memory earlier is in host
				// memory for longer, so that more of it may be there at once.
				if i == 3 && !d.Nothing {
					f := d.Forecast
					more := residency.Counts{Out: st.Out - f.Counts.Out, In: st.In - f.Counts.In}
					if more.Out < 0 || more.In < more.Out || st.In > st.Out || st.Device > f.Peak || more.Out == 0 && st.Host+st.Device > f.Host+f.Peak || st.Host > f.Counts.OutBytes {
						t.Errorf("%+v of %v and %v were forecast, and there were %+v of %v and %v", f.Counts, f.Peak, f.Host, st.Counts, st.Device, st.Host)
					}
				}
				if mine, _ := b.r.Held(); mine != 0 {
					t.Errorf("%v of device memory are taken", mine)
				}
				if x.cfg.SavedLimit > 0 && st.Device > x.cfg.SavedLimit {
					t.Errorf("step %d counts %v of a limit of %v", i, st.Device, x.cfg.SavedLimit)
				}
			}
			left, err := b.replay(t, groups)
			if err != nil {
				t.Fatal(err)
			}
			// Nobody looks while a step is captured: it is the one that was forecast.
			st, d := b.r.off.Last(), b.r.Decision(memory.Key{})
			if f := d.Forecast; left != groups+st.In || !d.Nothing && (f.Counts != st.Counts || f.Peak != st.Device || st.Host > f.Host || f.Host > st.OutBytes) {
				t.Errorf("%+v of %v and %v were forecast, and there were %+v of %v and %v, left %d times", f.Counts, f.Peak, f.Host, st.Counts, st.Device, st.Host, left)
			}
			if _, err := b.step(t, groups, why); !errors.Is(err, why) || b.r.Decision(memory.Key{}) == nil {
				t.Errorf("%v: what was decided is forgotten", err)
			}
		})
	}
}

// What cannot be said together is refused, and steps do not nest.
func TestBorrowMisuse(t *testing.T) {
	dev, err := cpu.Open(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	compute, err := dev.NewStream("compute")
	if err != nil {
		t.Fatal(err)
	}
	lend := func(*offload.Storage) (device.Range, error) { return device.Range{}, nil }
	names := map[string]memory.Choice{"mlp": memory.Keep}
	for says, cfg := range map[string]Config{
		"leave Stash and Scopes out": {ProvideMemory: lend, Stash: &stash.ManagerConfig{}},
		"captures graphs":            {ProvideMemory: lend, Scopes: memory.Scopes(1)},
		"set SavedLimit alone":       {ProvideMemory: lend, SavedLimit: 1, Budget: 1},
		"combined with SavedLimit":   {ProvideMemory: lend, Budget: 1},
		"give one of them":           {GroupChoices: names, Policy: memory.Policy{}},
		"choose keep or offload":     {GroupChoices: map[string]memory.Choice{"mlp": memory.Recompute}},
	} {
		cfg.Device, cfg.Compute = dev, compute
		if r, err := Open(cfg); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, %v", says, r, err)
		}
	}
	b := newBorrower(t, Config{})
	s, err := b.r.Begin(memory.Key{})
	if err != nil {
		t.Fatal(err)
	}
	panics := func(says string, f func()) {
		t.Helper()
		defer func() {
			if x := recover(); x == nil || !strings.Contains(x.(string), says) {
				t.Errorf("%s: %v", says, x)
			}
		}()
		f()
	}
	panics("inside of a step", func() { _, _ = b.r.Begin(memory.Key{}) })
	if err := s.End(nil); err != nil {
		t.Error(err)
	}
	panics("after its body returned", func() { _ = s.End(nil) })
	panics("after its body returned", func() { _, _ = s.Borrow(device.Range{}, nil) })
}
