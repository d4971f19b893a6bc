// This file owns the tests of functions that whole runs hardly show: what processes tell each
// other, parts of tensors, and figures of ranks that differ.

package train

import (
	"bytes"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/train/internal/checkpoint"
	"github.com/stowage-dev/stowage/train/internal/checkpoint/safetensors"
)

// An error that another process has reads as it does there, has the same cause with all of its
// figures, and names the same rank, the first one too.
func TestErrorsOfOtherProcesses(t *testing.T) {
	for _, cause := range []error{
		&memory.BudgetError{Rank: 1, Budget: 2, Need: 3, Held: 4, HostFull: true},
		&residency.Full{Asked: 1, Live: 2, Limit: 3, Run: 4},
		&stash.Overflow{Rank: 1, Why: "too many"},
		&device.OutOfMemory{Device: "d", Kind: memory.Host, Owner: "o", Asked: 1, Free: 2, Capacity: 3, Pending: 4, Refused: "r"},
		&device.DriverError{Device: "d", Call: "c", Code: 1, Text: "t"},
		&device.Unsupported{What: "w", Why: "y", Need: "n"},
	} {
		for rank := -1; rank < 2; rank++ {
			own := cause
			if rank >= 0 {
				own = memory.OnRank(rank, cause)
			}
			own = fmt.Errorf("before: %w; after", own)
			var text bytes.Buffer
			var got toldError
			if err := errors.Join(gob.NewEncoder(&text).Encode(tellError(own)), gob.NewDecoder(&text).Decode(&got)); err != nil {
				t.Fatal(err)
			}
			found := reflect.New(reflect.TypeOf(cause))
			if got.Error() != own.Error() || !errors.As(&got, found.Interface()) || !reflect.DeepEqual(found.Elem().Interface(), any(cause)) {
				t.Errorf("%v becomes %v, with %+v", own, &got, found.Elem())
			}
			var at *memory.RankError
			if errors.As(&got, &at) != (rank >= 0) || rank >= 0 && at.Rank != rank {
				t.Errorf("%v of rank %d names %+v", cause, rank, at)
			}
		}
	}
	lost := &comm.Failure{Rank: 1, By: 2, Err: errors.New("gone")}
	if e := tellError(fmt.Errorf("a: %w", lost)); !e.Failure || e.Unwrap() != nil || tellError(errors.New("b")).Failure || tellError(nil) != nil {
		t.Errorf("%+v", e)
	}
}

// meeting is a communicator of processes that are goroutines.
type meeting struct {
	comm.Comm
	rank int
	with *table
}

type table struct {
	mu    sync.Mutex
	all   *sync.Cond
	size  int
	texts [][]byte
	came  int
	last  [][]byte
	round int
}

func (m meeting) Rank() int { return m.rank }

func (m meeting) Gather(text []byte) ([][]byte, error) {
	x := m.with
	x.mu.Lock()
	defer x.mu.Unlock()
	x.texts[m.rank] = text
	round := x.round
	if x.came++; x.came == x.size {
		x.last, x.texts, x.came, x.round = x.texts, make([][]byte, x.size), 0, round+1
		x.all.Broadcast()
	}
	for x.round == round {
		x.all.Wait()
	}
	return x.last, nil
}

// Tensors of several processes are visited by name, each once and whole, also those that take
// several messages.
func TestTensorsOfAllProcesses(t *testing.T) {
	sizes := map[string]int{"a": 3, "b": pieceBytes/4 + 5, "c": pieceBytes / 4, "d": 1}
	tensors := func(names ...string) (out []tensor) {
		for _, name := range names {
			x := tensor{name, make([]float32, sizes[name])}
			for i := range x.data {
				x.data[i] = float32(i % 1009)
			}
			out = append(out, x)
		}
		return out
	}
	visited := func(tr *Trainer, own []tensor) (text string, all []byte) {
		if err := tr.eachTensor(own, func(name string, elements int, part []byte) {
			text += fmt.Sprintf("%s %d; ", name, elements)
			all = append(all, part...)
		}); err != nil {
			t.Error(err)
		}
		return text, all
	}
	_, want := visited(&Trainer{cfg: &Config{}}, tensors("d", "b", "c", "a"))
	x := &table{size: 2, texts: make([][]byte, 2)}
	x.all = sync.NewCond(&x.mu)
	var processes sync.WaitGroup
	for rank, own := range [][]tensor{tensors("d", "b"), tensors("c", "a")} {
		processes.Go(func() {
			text, got := visited(&Trainer{cfg: &Config{Process: &comm.Process{Control: meeting{rank: rank, with: x}}}}, own)
			if order := fmt.Sprintf("a 3; b %[1]d; b %[1]d; c %d; d 1; ", sizes["b"], sizes["c"]); text != order || !bytes.Equal(got, want) {
				t.Errorf("process %d visits %s with %d bytes, want %s with %d", rank, text, len(got), order, len(want))
			}
		})
	}
	processes.Wait()
}

// Of ranks that differ, metrics have the reruns of the one with the most, and what the fullest
// hold after the step, which is not the most that they held.
func TestFiguresOfUnlikeRanks(t *testing.T) {
	usage := func(dev, host memory.Bytes) (u device.Usage) {
		u.Kind[memory.Device].Current, u.Kind[memory.Device].Peak = dev, dev+100
		u.Kind[memory.Host].Current, u.Kind[memory.Host].Peak = host, host+100
		return u
	}
	tr := &Trainer{cfg: &Config{Process: &comm.Process{}}, all: []status{
		{Usage: usage(5, 9), Summary: memory.Summary{Stash: &memory.StashCounts{Reruns: 2}}},
		{Usage: usage(7, 8), Summary: memory.Summary{Stash: &memory.StashCounts{Reruns: 3}}},
		{Usage: usage(6, 3)},
	}}
	dev, host := inUse(tr.Usage())
	if tr.Reruns() != 3 || dev != 7 || host != 9 {
		t.Errorf("%d reruns, %d bytes of device and %d of host memory", tr.Reruns(), dev, host)
	}
}

// A tensor is read from parts that follow each other without a hole and do not overlap.
func TestPartsOfATensor(t *testing.T) {
	file := func(names ...string) *files {
		f := &files{of: map[string][]part{}}
		for i, name := range names {
			var b bytes.Buffer
			w, err := safetensors.NewWriter(&b, safetensors.NewLayout(nil, []safetensors.Tensor{{Name: name, Shape: []int{2}}}))
			if err != nil {
				t.Fatal(err)
			}
			if err := w.Write(name, bytesOf([]float32{float32(10 * i), float32(10*i + 1)})); err != nil {
				t.Fatal(err)
			}
			r, err := safetensors.NewReader(bytes.NewReader(b.Bytes()), int64(b.Len()))
			if err != nil {
				t.Fatal(err)
			}
			of, from := tensorName(name)
			f.of[of] = append(f.of[of], part{&checkpoint.Tensors{Reader: r, Closer: io.NopCloser(nil)}, name, from, 2})
		}
		return f
	}
	for _, x := range []struct {
		names string
		of    int
		want  string
	}{
		{"x", 2, "[0 1]"}, {"x@0 x@2", 4, "[0 1 10 11]"}, {"x@0 x@2 x@4", 6, "[0 1 10 11 20 21]"},
		{"x@0 x@1", 4, "at 1"}, {"x@0 x@3", 4, "at 3"}, {"x@2 x@4", 4, "at 2"}, {"x@0 x@2", 5, "got 4"}, {"x@-1", 2, "no tensor x"}, {"y", 2, "no tensor x"},
	} {
		f, got := file(strings.Fields(x.names)...), make([]float32, x.of)
		if err := f.read("x", x.of, 0, got); err == nil && fmt.Sprint(got) != x.want || err != nil && !strings.Contains(err.Error(), x.want) {
			t.Errorf("%s as %d numbers: %v, %v", x.names, x.of, got, err)
		}
	}
	got := make([]float32, 3)
	if err := file("x@0", "x@2", "x@4").read("x", 6, 1, got); err != nil || fmt.Sprint(got) != "[1 10 11]" {
		t.Errorf("a part over the end of another: %v, %v", got, err)
	}
}

// A budget must exceed what is held before the first step, and the error says what would do.
func TestBudgetOfWhatIsHeld(t *testing.T) {
	c := quick(t, mixed())
	c.Layout, c.Memory.Links = Layout{1, 1, 1, 1}, links
	held := func(budget memory.Bytes) (*memory.BudgetError, error) {
		c.Memory = namedMemory(t, "stash")
		c.Memory.Budget, c.Memory.Links = budget, links
		tr, err := New(c)
		if err == nil {
			err = tr.Close()
		}
		var low *memory.BudgetError
		errors.As(err, &low)
		return low, err
	}
	low, err := held(1)
	if low == nil || low.Held < 1 || low.Need != low.Held+1 || low.Budget != 1 {
		t.Fatalf("%+v, %v", low, err)
	}
	if same, err := held(low.Held); same == nil || same.Held != low.Held {
		t.Errorf("a budget of all that is held: %v", err)
	}
	if more, err := held(low.Need); more != nil && more.Held > 0 {
		t.Errorf("a budget of what was said to do: %v", err)
	}
}

// Ranks do their transfers as soon as the sender can send, given that a backward pass takes
// twice as long as a forward pass.
func TestPrograms(t *testing.T) {
	for _, x := range []struct {
		of   schedule.Pipeline
		want []string
	}{
		{schedule.Pipeline{Ranks: 2, Chunks: 1, Microbatches: 3}, []string{
			"F0.0 >F0.0 F0.1 >F0.1 <B0.0 B0.0 F0.2 <B0.1 >F0.2 B0.1 <B0.2 B0.2",
			"<F0.0 F0.0 <F0.1 B0.0 >B0.0 F0.1 B0.1 >B0.1 <F0.2 F0.2 B0.2 >B0.2",
		}},
	} {
		all, err := programs(x.of)
		if err != nil {
			t.Fatal(err)
		}
		for rank, program := range all {
			var words []string
			for _, a := range program {
				way := map[bool]string{false: "F", true: "B"}[a.pass.Backward]
				words = append(words, fmt.Sprintf("%s%s%d.%d", [...]string{receive: "<", send: ">", compute: ""}[a.verb], way, a.pass.Chunk, a.pass.Microbatch))
			}
			if got := strings.Join(words, " "); got != x.want[rank] {
				t.Errorf("rank %d does\n%s, want\n%s", rank, got, x.want[rank])
			}
		}
	}
}

// Of the errors of several processes all return the first that is no consequence of another, or
// else the first; the process that has it returns its own.
func TestFirstErrorOfAll(t *testing.T) {
	const n = 3
	for kinds := range 27 { // of each process: none, an error, or that another one is gone
		own := make([]error, n)
		want := -1
		for i, k := 0, kinds; i < n; i, k = i+1, k/3 {
			switch k % 3 {
			case 1:
				own[i] = fmt.Errorf("error of process %d", i)
			case 2:
				own[i] = &comm.Failure{By: 9, Err: fmt.Errorf("process %d lost another", i)}
			}
		}
		for i, err := range own {
			if f := new(comm.Failure); err != nil && (want < 0 || errors.As(own[want], &f) && !errors.As(err, &f)) {
				want = i
			}
		}
		x := &table{size: n, texts: make([][]byte, n)}
		x.all = sync.NewCond(&x.mu)
		var processes sync.WaitGroup
		for i := range n {
			processes.Go(func() {
				all, err := (&Trainer{cfg: &Config{Process: &comm.Process{Control: meeting{rank: i, with: x}}}}).tell(statement{Err: tellError(own[i])}, own[i])
				switch {
				case len(all) != n:
					t.Errorf("%d statements", len(all))
				case want < 0:
					if err != nil {
						t.Error(err)
					}
				case i == want && err != own[i], err == nil, err.Error() != own[want].Error():
					t.Errorf("%v: process %d returns %v, want that of process %d", own, i, err, want)
				}
			})
		}
		processes.Wait()
	}
}
