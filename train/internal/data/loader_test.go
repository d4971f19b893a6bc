package data

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/golden"
)

// numbered is a text in which four bytes tell their place.
func numbered(n int) *Text {
	var b bytes.Buffer
	for i := 0; b.Len() < n; i++ {
		fmt.Fprintf(&b, "%07d,", i)
	}
	return NewText("numbers", b.Bytes()[:n])
}

func mustLoad(t rapid.TB, text *Text, c LoaderConfig) *Loader {
	t.Helper()
	l, err := NewLoader(text, c)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// all gives the windows that a step takes, in the order of ranks and microbatches,
// after checking that targets are the inputs moved on.
func all(t rapid.TB, l *Loader, step int) (windows []string) {
	t.Helper()
	c := l.config
	tokens := c.Micro * c.Seq
	inputs, targets := make([]uint32, tokens), make([]uint32, tokens*c.Targets)
	for rank := range c.Ranks {
		for mb := range c.Microbatches {
			l.Batch(step, rank, mb, inputs, targets)
			for i := range c.Micro {
				window := make([]byte, c.Seq+c.Targets)
				for j := range c.Seq {
					window[j] = byte(inputs[i*c.Seq+j])
				}
				for ahead := range c.Targets {
					window[c.Seq+ahead] = byte(targets[ahead*tokens+i*c.Seq+c.Seq-1])
				}
				for ahead := range c.Targets {
					for j := range c.Seq {
						if got, want := targets[ahead*tokens+i*c.Seq+j], uint32(window[j+1+ahead]); got != want {
							t.Fatalf("target %d of token %d is %d, want %d", ahead+1, j, got, want)
						}
					}
				}
				windows = append(windows, string(window))
			}
		}
	}
	return windows
}

// Every epoch has each of its windows once, Seq apart, over all ranks and
// microbatches, and another offset or order than the one before.
func TestEpochs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(name string, most int) int { return rapid.IntRange(1, most).Draw(t, name) }
		c := LoaderConfig{
			Seq: draw("seq", 12), Micro: draw("micro", 3), Microbatches: draw("microbatches", 3),
			Ranks: draw("ranks", 3), Targets: draw("targets", 3), Seed: rapid.Uint64().Draw(t, "seed"),
		}
		// Windows of at least 16 bytes of the numbers are all different.
		c.Seq += 16
		text := numbered(c.Seq + c.Targets + rapid.IntRange(0, 400).Draw(t, "more"))
		l := mustLoad(t, text, c)
		var stream []string
		for step := 0; len(stream) < 3*l.Windows(); step++ {
			stream = append(stream, all(t, l, step)...)
		}
		for epoch := range 3 {
			starts := map[int]bool{}
			least := text.Len()
			for _, w := range stream[epoch*l.Windows():][:l.Windows()] {
				at := bytes.Index(text.bytes, []byte(w))
				if at < 0 || starts[at] {
					t.Fatalf("epoch %d has the window at %d twice, or it is none", epoch, at)
				}
				starts[at] = true
				least = min(least, at)
			}
			for i := range l.Windows() {
				if !starts[least+i*c.Seq] {
					t.Fatalf("epoch %d has no window at %d", epoch, least+i*c.Seq)
				}
			}
			// What an epoch leaves out is less than two sequences.
			if left := text.Len() - l.Windows()*c.Seq - c.Targets; left >= 2*c.Seq {
				t.Fatalf("%d bytes are left out", left)
			}
		}
	})
}

// Seeds, epochs and steps give different orders; the same ones the same.
func TestOrders(t *testing.T) {
	text := numbered(40_000)
	c := LoaderConfig{Seq: 32, Micro: 4, Microbatches: 2, Ranks: 2, Targets: 1, Seed: 1}
	l := mustLoad(t, text, c)
	first := fmt.Sprint(all(t, l, 0))
	if again := fmt.Sprint(all(t, mustLoad(t, text, c), 0)); again != first {
		t.Error("the same settings gave other batches")
	}
	c.Seed = 2
	if other := fmt.Sprint(all(t, mustLoad(t, text, c), 0)); other == first {
		t.Error("another seed gave the same batches")
	}
	seen := map[string]int{}
	for epoch := range 5 {
		seen[string(l.window(uint64(epoch*l.Windows())))]++
	}
	if len(seen) < 4 {
		t.Errorf("five epochs begin with %d windows", len(seen))
	}
}

// The order looks like a random one: neighbours of the text are as rarely
// neighbours in an epoch as chance has it, and each of five places gets windows of
// the whole text.
func TestShuffled(t *testing.T) {
	const n = 10_000
	neighbours, sum := 0, [5]float64{}
	for i := range uint64(n) {
		p, q := permute(i, n, 12345), permute((i+1)%n, n, 12345)
		if p+1 == q || q+1 == p {
			neighbours++
		}
		sum[i*5/n] += float64(p)
	}
	if neighbours > 12 { // the mean is 2, as for a Poisson distribution
		t.Errorf("%d neighbours stay together", neighbours)
	}
	for i, s := range sum { // the deviation of a mean of 2000 is 0.29 n / 45 = 65
		if mean := s / (n / 5); mean < n/2-325 || mean > n/2+325 {
			t.Errorf("part %d has the mean %.0f", i, mean)
		}
	}
}

func TestPermute(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n, key := rapid.Uint64Range(1, 3000).Draw(t, "n"), rapid.Uint64().Draw(t, "key")
		seen := make([]bool, n)
		for i := range n {
			p := permute(i, n, key)
			if p >= n || seen[p] {
				t.Fatalf("%d of %d goes to %d, as another one does", i, n, p)
			}
			seen[p] = true
		}
	})
}

// The numbers must stay as they are for ever: checkpoints depend on them.
func TestGolden(t *testing.T) {
	var b strings.Builder
	for _, x := range []uint64{0, 1, 1 << 63} {
		fmt.Fprintf(&b, "mix(%d) = %#x\n", x, mix(x))
	}
	for _, n := range []uint64{1, 2, 10, 1 << 20, 1<<40 + 1} {
		fmt.Fprintf(&b, "permute(0..9, %d, 42) =", n)
		for i := range min(n, 10) {
			fmt.Fprint(&b, " ", permute(i, n, 42))
		}
		fmt.Fprintln(&b)
	}
	text, err := Open("")
	if err != nil {
		t.Fatal(err)
	}
	l := mustLoad(t, text, LoaderConfig{Seq: 48, Micro: 1, Microbatches: 2, Ranks: 2, Targets: 2, Seed: 7})
	for _, step := range []int{0, 1, 5000} {
		for i, w := range all(t, l, step) {
			fmt.Fprintf(&b, "step %d, sequence %d: %q\n", step, i, w)
		}
	}
	golden.Check(t, "batches.txt", b.String())
}

func TestLoaderRefused(t *testing.T) {
	good := LoaderConfig{Seq: 8, Micro: 1, Microbatches: 1, Ranks: 1, Targets: 2}
	mustLoad(t, numbered(10), good)
	for want, change := range map[string]func(*LoaderConfig){
		"Seq is 0":           func(c *LoaderConfig) { c.Seq = 0 },
		"Micro is -1":        func(c *LoaderConfig) { c.Micro = -1 },
		"Microbatches is 0":  func(c *LoaderConfig) { c.Microbatches = 0 },
		"Ranks is 0":         func(c *LoaderConfig) { c.Ranks = 0 },
		"Targets is 0":       func(c *LoaderConfig) { c.Targets = 0 },
		"Micro is 104857600": func(c *LoaderConfig) { c.Micro = 100 << 20 },
		"has 10 bytes, too few for one sequence of 9 with 2": func(c *LoaderConfig) { c.Seq = 9 },
	} {
		c := good
		change(&c)
		if _, err := NewLoader(numbered(10), c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	good.Micro, good.Microbatches, good.Ranks = Most, Most, Most
	mustLoad(t, numbered(10), good)
	good.Micro, good.Microbatches, good.Ranks = 1, 1, 1
	l := mustLoad(t, numbered(10), good)
	for _, x := range []struct {
		at              [3]int
		inputs, targets int
		words           string
	}{
		{[3]int{-1, 0, 0}, 8, 16, "there is no microbatch 0 of rank 0 in step -1"},
		{[3]int{0, -1, 0}, 8, 16, "there is no microbatch 0 of rank -1 in step 0"},
		{[3]int{0, 1, 0}, 8, 16, "there is no microbatch 0 of rank 1 in step 0"},
		{[3]int{0, 0, -1}, 8, 16, "there is no microbatch -1 of rank 0 in step 0"},
		{[3]int{0, 0, 1}, 8, 16, "there is no microbatch 1 of rank 0 in step 0"},
		{[3]int{0, 0, 0}, 8, 8, "8 inputs and 16 targets, not 8 and 8"},
		{[3]int{0, 0, 0}, 8, 17, "8 inputs and 16 targets, not 8 and 17"},
		{[3]int{0, 0, 0}, 9, 16, "8 inputs and 16 targets, not 9 and 16"},
	} {
		func() {
			defer func() {
				if said := fmt.Sprint(recover()); !strings.Contains(said, x.words) {
					t.Errorf("%s, want %s", said, x.words)
				}
			}()
			l.Batch(x.at[0], x.at[1], x.at[2], make([]uint32, x.inputs), make([]uint32, x.targets))
		}()
	}
}

// A state that went through JSON matches its own settings and no others.
func TestState(t *testing.T) {
	c := LoaderConfig{Seq: 8, Micro: 2, Microbatches: 3, Ranks: 4, Targets: 2, Seed: 1<<64 - 1}
	l := mustLoad(t, numbered(100), c)
	text, err := json.Marshal(l.State())
	if err != nil {
		t.Fatal(err)
	}
	var saved State
	if err := json.Unmarshal(text, &saved); err != nil {
		t.Fatal(err)
	}
	moved := NewText("elsewhere", numbered(100).bytes)
	if err := mustLoad(t, moved, c).Check(saved); err != nil {
		t.Error(err)
	}
	for want, change := range map[string]func(*LoaderConfig){
		"Seq was 8 and is 9":                     func(c *LoaderConfig) { c.Seq++ },
		"Micro was 24 and is 36":                 func(c *LoaderConfig) { c.Micro++ },
		"Micro was 24 and is 32":                 func(c *LoaderConfig) { c.Microbatches++ },
		"Micro was 24 and is 30":                 func(c *LoaderConfig) { c.Ranks++ },
		"Targets was 2 and is 3":                 func(c *LoaderConfig) { c.Targets++ },
		"Seed was 18446744073709551615 and is 0": func(c *LoaderConfig) { c.Seed++ },
	} {
		other := c
		change(&other)
		if err := mustLoad(t, moved, other).Check(saved); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	// The sequences of a step are the same however they are divided, and in the same order.
	for _, other := range []LoaderConfig{
		{Seq: 8, Micro: 1, Microbatches: 6, Ranks: 4, Targets: 2, Seed: c.Seed}, {Seq: 8, Micro: 24, Microbatches: 1, Ranks: 1, Targets: 2, Seed: c.Seed},
	} {
		o := mustLoad(t, moved, other)
		if err := o.Check(saved); err != nil {
			t.Error(err)
		}
		if got, want := inputsOf(o, 7), inputsOf(l, 7); !slices.Equal(got, want) {
			t.Errorf("%+v has the inputs %v in a step, want %v", other, got, want)
		}
	}
	if err := mustLoad(t, numbered(101), c).Check(saved); err == nil || !strings.Contains(err.Error(), "another text") {
		t.Errorf("another text: %v", err)
	}
}

// inputsOf returns the inputs of a step: rank by rank, microbatch by microbatch.
func inputsOf(l *Loader, step int) (out []uint32) {
	c := l.Config()
	for rank := range c.Ranks {
		for m := range c.Microbatches {
			inputs := make([]uint32, c.Micro*c.Seq)
			l.Batch(step, rank, m, inputs, make([]uint32, len(inputs)*c.Targets))
			out = append(out, inputs...)
		}
	}
	return out
}

// Ranks ask at the same time.
func TestConcurrent(t *testing.T) {
	c := LoaderConfig{Seq: 16, Micro: 2, Microbatches: 4, Ranks: 3, Targets: 1}
	l := mustLoad(t, numbered(5000), c)
	want := fmt.Sprint(all(t, l, 9))
	var wait sync.WaitGroup
	for range 4 {
		wait.Go(func() {
			if got := fmt.Sprint(all(t, l, 9)); got != want {
				t.Error("batches differ")
			}
		})
	}
	wait.Wait()
}

func BenchmarkBatch(b *testing.B) {
	text, err := Open("")
	if err != nil {
		b.Fatal(err)
	}
	c := LoaderConfig{Seq: 512, Micro: 4, Microbatches: 1, Ranks: 1, Targets: 1}
	l := mustLoad(b, text, c)
	inputs, targets := make([]uint32, 2048), make([]uint32, 2048)
	b.SetBytes(2048)
	step := 0
	for b.Loop() {
		l.Batch(step, 0, 0, inputs, targets)
		step++
	}
}
