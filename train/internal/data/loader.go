// This file owns the batches: which windows of the text a microbatch has.

package data

import (
	"errors"
	"fmt"
	"strings"
)

// LoaderConfig says how a text is cut into batches.
type LoaderConfig struct {
	Seq          int    `json:"seq"`          // tokens of a sequence
	Micro        int    `json:"micro"`        // sequences of a microbatch
	Microbatches int    `json:"microbatches"` // of one rank in one step
	Ranks        int    `json:"ranks"`        // data-parallel
	Targets      int    `json:"targets"`      // how many tokens ahead are predicted, at least 1
	Seed         uint64 `json:"seed"`
}

// Most bounds every number, so that no product of three overflows.
const Most = 1 << 20

func (c LoaderConfig) check() error {
	for _, f := range []struct {
		name  string
		value int
	}{{"Seq", c.Seq}, {"Micro", c.Micro}, {"Microbatches", c.Microbatches}, {"Ranks", c.Ranks}, {"Targets", c.Targets}} {
		if f.value < 1 || f.value > Most {
			return fmt.Errorf("%s is %d: give a number from 1 to %d", f.name, f.value, Most)
		}
	}
	return nil
}

// Loader gives the batches of a text. An epoch draws an offset, cuts the text from
// there on into windows of Seq+Targets bytes, Seq apart, and takes them in a
// shuffled order; all epochs have the same number of windows. The sequences of
// all steps, ranks and microbatches are numbered through and take the windows one
// after the other, so that every window comes once an epoch. A Loader has no state:
// any number of goroutines may use it at once.
type Loader struct {
	text    *Text
	config  LoaderConfig
	windows uint64 // of an epoch
	offsets uint64 // to draw from
}

// NewLoader cuts a text.
func NewLoader(text *Text, c LoaderConfig) (*Loader, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	cut := text.Len() - c.Targets // bytes that can be inputs
	if cut < c.Seq {
		bytes := "bytes"
		if text.Len() == 1 {
			bytes = "byte"
		}
		return nil, fmt.Errorf("%s has %d %s, too few for one sequence of %d with %d to predict: give more text or shorter sequences",
			text.Name(), text.Len(), bytes, c.Seq, c.Targets)
	}
	// One window fewer than fit, so that at least Seq offsets do: otherwise the
	// same bytes would stand at the same place of a window in every epoch.
	windows := max(1, (cut-c.Seq+1)/c.Seq)
	return &Loader{text, c, uint64(windows), uint64(cut - windows*c.Seq + 1)}, nil
}

// Text is the text.
func (l *Loader) Text() *Text { return l.text }

// Config is how it is cut.
func (l *Loader) Config() LoaderConfig { return l.config }

// Windows is how many sequences an epoch has.
func (l *Loader) Windows() int { return int(l.windows) }

// Sequences is how many sequences all ranks have in one step.
func (c LoaderConfig) Sequences() int { return c.Ranks * c.Microbatches * c.Micro }

// TokensPerStep is the input tokens of all ranks in one step.
func (l *Loader) TokensPerStep() int { return l.config.Sequences() * l.config.Seq }

// Batch fills the tokens of one microbatch: inputs with Micro sequences of Seq
// tokens, and targets with Targets times as many, first the tokens that come right
// after each of the inputs, then those that come two after, and so on.
// What is out of range or has another length panics.
func (l *Loader) Batch(step, rank, microbatch int, inputs, targets []uint32) {
	c := l.config
	tokens := c.Micro * c.Seq
	switch {
	case step < 0 || rank < 0 || rank >= c.Ranks || microbatch < 0 || microbatch >= c.Microbatches:
		panic(fmt.Sprintf("data: there is no microbatch %d of rank %d in step %d", microbatch, rank, step))
	case len(inputs) != tokens || len(targets) != tokens*c.Targets:
		panic(fmt.Sprintf("data: a microbatch has %d inputs and %d targets, not %d and %d", tokens, tokens*c.Targets, len(inputs), len(targets)))
	}
	first := ((uint64(step)*uint64(c.Ranks)+uint64(rank))*uint64(c.Microbatches) + uint64(microbatch)) * uint64(c.Micro)
	for i := range c.Micro {
		window := l.window(first + uint64(i))
		widen(inputs[i*c.Seq:][:c.Seq], window)
		for ahead := range c.Targets {
			widen(targets[ahead*tokens+i*c.Seq:][:c.Seq], window[1+ahead:])
		}
	}
}

// window is the bytes of the sequence with that number.
func (l *Loader) window(sequence uint64) []byte {
	epoch, i := sequence/l.windows, sequence%l.windows
	key := mix(mix(l.config.Seed) + epoch)
	begin := int(mix(key)%l.offsets) + int(permute(i, l.windows, key))*l.config.Seq
	return l.text.bytes[begin:][:l.config.Seq+l.config.Targets]
}

func widen(to []uint32, from []byte) {
	from = from[:len(to)]
	for i := range to {
		to[i] = uint32(from[i])
	}
}

// State is what a checkpoint keeps of the data. The step is the trainer's.
type State struct {
	Name   string `json:"name"`
	Bytes  int    `json:"bytes"`
	SHA256 string `json:"sha256"`
	LoaderConfig
}

// State describes the text and how it is cut.
func (l *Loader) State() State {
	return State{l.text.Name(), l.text.Len(), l.text.SHA256(), l.config}
}

// Check says whether a run that saved this state goes on with the same sequences in
// every step here. The text may have another name, and the sequences of a step may be
// divided otherwise over ranks and microbatches.
func (l *Loader) Check(saved State) error {
	now := l.State()
	if saved.SHA256 != now.SHA256 {
		return fmt.Errorf("the run was trained on %s of %d bytes, and %s of %d bytes is another text; give the same text with the same part held out to resume",
			saved.Name, saved.Bytes, now.Name, now.Bytes)
	}
	var differ []string
	add := func(name string, was, is any) {
		if was != is {
			differ = append(differ, fmt.Sprintf("%s was %v and is %v", name, was, is))
		}
	}
	add("Seq", saved.Seq, now.Seq)
	add("Ranks x Microbatches x Micro", saved.Sequences(), now.Sequences())
	add("Targets", saved.Targets, now.Targets)
	add("Seed", saved.Seed, now.Seed)
	if len(differ) > 0 {
		return errors.New("the batches would differ from those of the run to resume: " + strings.Join(differ, ", ") + "; give the same settings")
	}
	return nil
}
