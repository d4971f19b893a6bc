// This file owns the tests of a run whose ranks live in several processes. Each process
// is a goroutine with a trainer of its own.

package train

import (
	"bytes"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/commtest"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/checkpoint"
	"github.com/stowage-dev/stowage/train/internal/data"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// inProcesses runs work in processes that hold the given ranks.
func inProcesses(t *testing.T, c Config, ranks [][]int, work func(process int, c Config) error) {
	t.Helper()
	ps := commtest.Processes(t, func() (device.Device, error) { return cpu.Open(cpu.Options{}) }, ranks...)
	errs := make([]error, len(ranks))
	var all sync.WaitGroup
	for i := range ranks {
		all.Go(func() {
			c := c
			c.Process = ps[i]
			if errs[i] = work(i, c); errs[i] != nil {
				ps[i].Control.Abort(errs[i])
			}
		})
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// eachAlone returns one process for each rank.
func eachAlone(c Config) (ranks [][]int) {
	for r := range c.Layout.Ranks() {
		ranks = append(ranks, []int{r})
	}
	return ranks
}

// results are those of a run. Figures of memory and times are not the same in every run,
// but those that the processes of a run know are.
type results struct {
	metrics []Metrics // without memory and times
	eval    float64
	digest  string
	known   string // what the processes know of each rank
}

func resultsOf(c Config, steps int) (out results, err error) {
	tr, err := New(c)
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, tr.Close()) }()
	note := func(v any) {
		text, e := json.Marshal(v)
		err = errors.Join(err, e)
		out.known += string(text) + "\n"
	}
	for range steps {
		m, err := tr.Step()
		if err != nil {
			return out, err
		}
		m.Seconds = 0
		note(m)
		m.Reruns, m.Device, m.Host = 0, 0, 0
		out.metrics = append(out.metrics, m)
	}
	if out.eval, _, err = tr.Evaluate(1); err != nil {
		return out, err
	}
	if out.digest, err = tr.Digest(); err != nil {
		return out, err
	}
	note(tr.Usage())
	note(tr.Summaries())
	note(tr.Forecasts())
	note(tr.Decisions())
	return out, err
}

// sameInProcesses compares a run in one process with the same run in several. It returns
// the reruns of the latter.
func sameInProcesses(t *testing.T, c Config, steps int, ranks [][]int) (reruns int) {
	t.Helper()
	if raceEnabled { // as many goroutines meet over fewer tokens
		c.Batch.Micro, c.Batch.Seq, c.Batch.Microbatches = 1, 16, 2
	}
	var err error
	if c.Text, c.HeldOut, err = c.Text.Split(0.2); err != nil {
		t.Fatal(err)
	}
	want, err := resultsOf(c, steps)
	if err != nil {
		t.Fatal(err)
	}
	all := make([]results, len(ranks))
	inProcesses(t, c, ranks, func(i int, c Config) (err error) {
		all[i], err = resultsOf(c, steps)
		return err
	})
	for i, got := range all {
		if !reflect.DeepEqual(got.metrics, want.metrics) || got.eval != want.eval || got.digest != want.digest {
			t.Errorf("process %d: %+v, %v, %s; want %+v, %v, %s", i, got.metrics, got.eval, got.digest, want.metrics, want.eval, want.digest)
		}
		if got.known != all[0].known {
			t.Errorf("process %d knows\n%s\nand process 0\n%s", i, got.known, all[0].known)
		}
	}
	if n := strings.Count(all[0].known, `"device_peak"`); n != c.Layout.Ranks() {
		t.Errorf("the processes know %d of %d ranks", n, c.Layout.Ranks())
	}
	var last Metrics
	if err := json.Unmarshal([]byte(strings.Split(all[0].known, "\n")[steps-1]), &last); err != nil {
		t.Fatal(err)
	}
	return last.Reruns
}

// Every layout and dispatch gives the same figures whether its ranks share a process or
// not.
func TestProcessesTrainAlike(t *testing.T) {
	layouts := []Layout{{1, 1, 1, 2}, {2, 1, 1, 1}, {1, 1, 2, 2}, {2, 2, 2, 2}, {2, 1, 2, 4}}
	if few() {
		layouts = layouts[3:4]
	}
	for _, m := range []*model.Model{smallMoE(), smallDeepSeek()} {
		for _, l := range layouts {
			for _, how := range []layer.Dispatch{layer.AllToAll, layer.Ring} {
				if how == layer.Ring && l.EP == 1 {
					continue
				}
				t.Run(fmt.Sprintf("%s/%+v/%v", m.Name, l, how), func(t *testing.T) {
					c := testConfig(t, m)
					c.Layout, c.Dispatch, c.Memory = l, how, namedMemory(t, "stash")
					c.Batch = Batch{Micro: 1, Seq: 32, Microbatches: 2}
					c.Settings.Routing.BiasRate = 1e-3
					sameInProcesses(t, c, 3, eachAlone(c))
				})
			}
		}
	}
}

// A process may hold several ranks.
func TestProcessesOfSeveralRanks(t *testing.T) {
	c := testConfig(t, smallMoE())
	c.Memory = namedMemory(t, "stash")
	sameInProcesses(t, c, 3, [][]int{{0, 3}, {1, 2}})
}

// All policies, and steps that are rerun, give the same figures in several processes.
func TestProcessesUnderPolicies(t *testing.T) {
	for _, name := range append(slices.Clone(Policies), "reruns") {
		if few() && name != "offload" && name != "reruns" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			c := testConfig(t, smallMoE())
			var err error
			if name == "reruns" {
				c.Memory = Memory{Rows: layer.Stashed, Fraction: 1, Room: 0.01, Sets: 1}
			} else if c.Memory, err = NamedMemory(name, budgetFor(name)); err != nil {
				t.Fatal(err)
			}
			if n := sameInProcesses(t, c, 5, eachAlone(c)); name == "reruns" && n == 0 {
				t.Error("no step was rerun")
			}
		})
	}
}

// Sharded parameters give the same figures in several processes.
func TestProcessesWithPools(t *testing.T) {
	for _, k := range []bucket.PoolKind{bucket.Dynamic, bucket.Rotary, bucket.Fixed, bucket.Max, bucket.Arena, bucket.Recorded} {
		if few() && k != bucket.Arena {
			continue
		}
		t.Run(k.String(), func(t *testing.T) {
			c := testConfig(t, smallMoE())
			c.Batch.Microbatches = 2
			c.Sharding = &Sharding{Pool: k, Prefetch: 1, GradComm: kernels.F32}
			sameInProcesses(t, c, 3, eachAlone(c))
		})
	}
}

// If one process fails, all return its error, and can open a trainer again.
func TestProcessesFailAlike(t *testing.T) {
	c := testConfig(t, smallMoE())
	open := c.Device
	inProcesses(t, c, eachAlone(c), func(process int, c Config) error {
		for _, x := range []struct {
			name string
			set  func(*Config)
			want func(error) bool
		}{
			{"no device", func(c *Config) {
				c.Device = func(rank int) (device.Device, error) {
					if rank == 2 {
						return nil, &device.Unsupported{What: "the device of rank 2", Why: "it is gone", Need: "put it back"}
					}
					return open(rank)
				}
			}, func(err error) bool {
				var e *device.Unsupported
				return errors.As(err, &e) && strings.Contains(err.Error(), "the device of rank 2 not available")
			}},
			{"too little memory on one", func(c *Config) {
				c.Device = func(rank int) (device.Device, error) {
					o := cpu.Options{}
					if rank == 1 {
						o.Capacity = [memory.Kinds]memory.Bytes{256 * memory.KiB, memory.GiB}
					}
					return cpu.Open(o)
				}
			}, func(err error) bool {
				var e *device.OutOfMemory
				return errors.As(err, &e) && strings.Contains(err.Error(), "rank 1")
			}},
			{"too small a budget", func(c *Config) { c.Memory.Budget = memory.MiB }, func(err error) bool {
				var e *memory.BudgetError
				return errors.As(err, &e)
			}},
		} {
			c := c
			x.set(&c)
			tr, err := New(c)
			if err == nil {
				_, err = tr.Step()
				_ = tr.Close()
			}
			if err == nil || !x.want(err) {
				t.Errorf("%s: process %d gets %v", x.name, process, err)
			}
		}
		_, err := oneStep(c)
		return err
	})
}

// Processes whose links were measured at different speeds all plan with those of the first: they
// would decide otherwise on each.
func TestProcessesPlanAlike(t *testing.T) {
	c := testConfig(t, smallMoE())
	c.Memory = namedMemory(t, "offload")
	inProcesses(t, c, eachAlone(c), func(process int, c Config) error {
		c.Memory.Links = memory.Links{Out: float64(10 + process), In: float64(20 + process)}
		tr, err := New(c)
		if err != nil {
			return err
		}
		if got, want := tr.ranks[0].rt.Links(), (memory.Links{Out: 10, In: 20}); got != want {
			t.Errorf("process %d plans with %+v, want %+v", process, got, want)
		}
		return tr.Close()
	})
}

// said is a communicator whose processes say what is given.
type said struct {
	comm.Comm
	rank int
	all  []statement
}

func (s said) Rank() int { return s.rank }

func (s said) Gather([]byte) (texts [][]byte, err error) {
	for _, x := range s.all {
		var text bytes.Buffer
		err = errors.Join(err, gob.NewEncoder(&text).Encode(x))
		texts = append(texts, text.Bytes())
	}
	return texts, err
}

// All processes return the error of the first that failed by itself, wherever it is among those
// that failed because of it.
func TestProcessesNameTheCause(t *testing.T) {
	for cause := range 3 {
		for me := range 4 {
			own := errors.New("rank 9 failed")
			x := said{rank: me}
			for i := range 4 {
				e := &toldError{Text: "rank 9 failed", Failure: true, Rank: -1}
				if i == cause || i == 3 {
					e = &toldError{Text: fmt.Sprintf("cause %d", i), Rank: -1}
				}
				if i == me {
					own = errors.New(e.Text)
				}
				x.all = append(x.all, statement{Err: e})
			}
			tr := &Trainer{cfg: &Config{Process: &comm.Process{Control: x}}}
			if _, err := tr.tell(statement{}, own); err == nil || err.Error() != fmt.Sprintf("cause %d", cause) {
				t.Errorf("process %d says %v, and process %d is the cause", me, err, cause)
			}
		}
	}
}

// Replicas and microbatches that see the same sequences have the same auxiliary loss: it is a mean.
func TestAuxIsAMean(t *testing.T) {
	var want float64
	for _, l := range []Layout{{1, 1, 1, 1}, {1, 1, 1, 2}, {2, 1, 1, 2}, {1, 1, 2, 4}} {
		c := testConfig(t, smallMoE())
		c.Layout, c.Batch = l, Batch{Micro: 1, Seq: 32, Microbatches: 4 / l.DP}
		c.Settings.Routing.Balance = 0.01
		m, err := oneStep(c)
		if err != nil {
			t.Fatal(err)
		}
		if want == 0 {
			want = m.Aux
		}
		if !(m.Aux > 0) || math.Abs(m.Aux/want-1) > 1e-5 {
			t.Errorf("%+v has an auxiliary loss of %g, want %g", l, m.Aux, want)
		}
	}
}

// oneStep trains one step.
func oneStep(c Config) (m Metrics, err error) {
	tr, err := New(c)
	if err != nil {
		return m, err
	}
	m, err = tr.Step()
	return m, errors.Join(err, tr.Close())
}

// A process that gives up between two calls ends the others.
func TestProcessGivesUp(t *testing.T) {
	c := testConfig(t, smallMoE())
	full := errors.New("the disk is full")
	inProcesses(t, c, eachAlone(c), func(process int, c Config) error {
		tr, err := New(c)
		if err != nil {
			return err
		}
		defer func() { _ = tr.Close() }()
		if process == 3 {
			c.Process.Control.Abort(full)
			return nil // and closes its communicators
		}
		_, err = tr.Step()
		if !errors.Is(err, full) {
			t.Errorf("process %d gets %v", process, err)
		}
		return nil
	})
}

// A run that processes saved goes on in one process and in processes, bit for bit.
func TestProcessesSave(t *testing.T) {
	for _, sharded := range []bool{false, true} {
		t.Run(fmt.Sprintf("sharded %v", sharded), func(t *testing.T) {
			c := testConfig(t, smallDeepSeek())
			c.Batch, c.Memory = Batch{Micro: 1, Seq: 32, Microbatches: 2}, namedMemory(t, "stash")
			c.Settings.Routing.BiasRate = 1e-3
			if sharded {
				c.Sharding = &Sharding{Pool: bucket.Arena, Prefetch: 1}
			}
			want := runConfig(t, c, 4).sum
			dir := t.TempDir()
			store, err := checkpoint.Open(checkpoint.Options{Dir: dir, Keep: 2})
			if err != nil {
				t.Fatal(err)
			}
			inProcesses(t, c, eachAlone(c), func(process int, c Config) error {
				tr, err := New(c)
				if err != nil {
					return err
				}
				for range 2 {
					_, e := tr.Step()
					err = errors.Join(err, e)
				}
				to := &checkpoint.Saver{Options: store.Options, Ranks: c.Layout.Ranks(), Gather: c.Process.Control.Gather}
				if process == 0 {
					to.Store = store
				}
				return errors.Join(err, tr.Save(to), to.Wait(), tr.Close())
			})
			if err := store.Close(); err != nil {
				t.Fatal(err)
			}
			goOn := func(c Config) error {
				from, err := checkpoint.Latest(checkpoint.Options{Dir: dir})
				if err != nil {
					return err
				}
				tr, err := New(c)
				if err != nil {
					return err
				}
				err = tr.Resume(from)
				for range 2 {
					_, e := tr.Step()
					err = errors.Join(err, e)
				}
				sum, e := tr.Digest()
				if sum != want {
					t.Errorf("resumed: %s, want %s", sum, want)
				}
				return errors.Join(err, e, tr.Close())
			}
			if err := goOn(c); err != nil {
				t.Fatal(err)
			}
			inProcesses(t, c, eachAlone(c), func(_ int, c Config) error { return goOn(c) })
		})
	}
}

// If one process cannot read the text, all say why.
func TestProcessLacksText(t *testing.T) {
	c := testConfig(t, smallMoE())
	c.Layout, c.Memory = Layout{1, 1, 1, 2}, namedMemory(t, "stash")
	ranks := eachAlone(c)
	said := make([]string, len(ranks))
	inProcesses(t, c, ranks, func(process int, c Config) error {
		if process == 1 {
			c.Text = data.NewText("book.txt", []byte("short"))
		}
		tr, err := New(c)
		if err == nil {
			return errors.Join(errors.New("a trainer was opened"), tr.Close())
		}
		said[process] = err.Error()
		return nil
	})
	if !strings.Contains(said[0], "book.txt") || said[0] != said[1] {
		t.Errorf("the processes said %q", said)
	}
}
