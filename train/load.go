// This file owns resuming: which runs a checkpoint can continue, and loading its tensors
// under any layout.

package train

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/train/internal/checkpoint"
	"github.com/stowage-dev/stowage/train/internal/checkpoint/safetensors"
	"github.com/stowage-dev/stowage/train/internal/data"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// Resume loads a checkpoint, so that the next step continues the saved run. The layout may
// differ, and so may Micro, Microbatches and whether parameters are sharded, if a step has
// as many sequences as before: they are the same ones. Parameters and the optimiser's state
// are loaded bit for bit, and on the same layout all later steps are the same bit for bit;
// on another one sums are made in another order. Resume returns an error if another setting
// differs that would change the results, or if the checkpoint cannot be read. Call it
// before the first step.
func (t *Trainer) Resume(from *checkpoint.Checkpoint) (err error) {
	f, err := t.openToResume(from)
	defer func() { err = errors.Join(err, f.close()) }()
	if err = t.alike(err); err != nil {
		return err
	}
	if _, err = t.together(func(i int) (figures, error) { return figures{}, t.ranks[i].resume(f) }); err != nil {
		t.broken = err
		return err
	}
	t.step = from.Step
	return nil
}

// damaged returns the error for a part of a checkpoint's description that is not one.
func damaged(what string, from *checkpoint.Checkpoint) error {
	return fmt.Errorf("the %s in %s cannot be read; resume from another checkpoint", what, from.Path)
}

// openToResume opens the files of a checkpoint that the run can continue from.
func (t *Trainer) openToResume(from *checkpoint.Checkpoint) (*files, error) {
	if err := t.resumable(from); err != nil {
		return &files{}, err
	}
	f, err := openFiles(from)
	if err == nil && f.flat {
		err = t.dividedAlike(from)
	}
	return f, err
}

// resumable returns an error if the checkpoint's settings differ from the run's.
func (t *Trainer) resumable(from *checkpoint.Checkpoint) error {
	var saved, mine map[string]any
	text, err := json.Marshal(t.cfg.identity())
	if err != nil {
		return err
	}
	if decode(from.Config, &saved) != nil || decode(text, &mine) != nil {
		return damaged("settings", from)
	}
	for _, x := range []map[string]any{saved, mine} {
		if batch, ok := x["batch"].(map[string]any); ok { // see sameBatch
			delete(batch, "micro")
			delete(batch, "microbatches")
		}
	}
	for _, name := range []string{"model", "number", "settings", "batch", "optim", "seed", "dispatch"} {
		if err := differs(name, saved[name], mine[name]); err != nil {
			return err
		}
	}
	var d division
	if json.Unmarshal(from.Layout, &d) != nil {
		return damaged("layout", from)
	}
	if o := t.cfg.division(); d.Sharded && o.Sharded && d.GradComm != o.GradComm {
		return &memory.SettingError{Setting: "GradComm", Asked: o.GradComm, Problem: "differs from the run's " + d.GradComm, Remedy: sameSettings}
	}
	var s data.State
	if json.Unmarshal(from.Data, &s) != nil {
		return damaged("state of the data", from)
	}
	if err := sameBatch(s.LoaderConfig, t.loader.Config()); err != nil {
		return err
	}
	return t.loader.Check(s)
}

// sameBatch returns an error if a step has another number of sequences than before, over
// all ranks. Sequences are numbered through all steps, so with the same number each step
// has the same ones.
func sameBatch(was, is data.LoaderConfig) error {
	if was.Sequences() == is.Sequences() {
		return nil
	}
	e := &memory.SettingError{
		Problem: fmt.Sprintf("makes %d sequences a step, but the run has %d", is.Sequences(), was.Sequences()),
		Remedy:  fmt.Sprintf("choose dp, microbatches and micro with the product %d", was.Sequences()),
	}
	for _, x := range []struct {
		setting string
		was, is int
	}{{"Micro", was.Micro, is.Micro}, {"Microbatches", was.Microbatches, is.Microbatches}, {"DP", was.Ranks, is.Ranks}} {
		if x.was != x.is {
			e.Setting, e.Asked = x.setting, fmt.Sprint(x.is)
		}
	}
	return e
}

// decode reads JSON and keeps numbers as they are written.
func decode(text []byte, to any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	return d.Decode(to)
}

// sameSettings is the remedy if a resumed run has other settings than its checkpoint.
const sameSettings = "resume with the settings of the run, or start a new run in another folder"

// savedNames maps what a checkpoint calls a setting to the name in the API, if letters
// and their case are not all that differs.
var savedNames = map[string]string{"optim.min_lr": "MinLR", "settings.Routing.Balance": "AuxLoss", "optim.epsilon": "Optim.Epsilon"}

// differs returns an error that names the first setting below a name in which a
// checkpoint and a run differ, or nil.
func differs(name string, saved, mine any) error {
	if reflect.DeepEqual(saved, mine) {
		return nil
	}
	a, inA := saved.(map[string]any)
	b, inB := mine.(map[string]any)
	e := &memory.SettingError{Setting: settingName(name), Remedy: sameSettings}
	switch {
	case name == "model":
		e.Asked, e.Problem = fmt.Sprint(b["name"]), fmt.Sprintf("differs from the run's %v", a["name"])
		if a["name"] == b["name"] {
			e.Problem = "has other sizes than the run's model of the same name"
		}
	case inA && inB:
		for _, keys := range []map[string]any{b, a} { // another version may have saved others
			for _, key := range slices.Sorted(maps.Keys(keys)) {
				if err := differs(name+"."+key, a[key], b[key]); err != nil {
					return err
				}
			}
		}
		return nil
	case saved == nil || mine == nil:
		e.Problem = "is not known to the version that saved the run"
		if mine == nil {
			e.Problem = "is known only to the version that saved the run"
		}
	case name == "number":
		e.Problem = fmt.Sprintf("differs: this run has %v, and the one to resume %v", mine, saved)
	default:
		e.Asked, e.Problem = fmt.Sprint(mine), fmt.Sprintf("differs from the run's %v", saved)
	}
	return e
}

// settingName returns the name in the API of a setting in a checkpoint.
func settingName(saved string) string {
	if name, ok := savedNames[saved]; ok {
		return name
	}
	name := ""
	for word := range strings.SplitSeq(saved[strings.LastIndexByte(saved, '.')+1:], "_") {
		if word == "lr" {
			word = "LR"
		}
		name += strings.ToUpper(word[:1]) + word[1:]
	}
	return name
}

// dividedAlike returns an error unless a checkpoint of an earlier version was saved on this
// layout with sharded parameters: its moments are those of shards.
func (t *Trainer) dividedAlike(from *checkpoint.Checkpoint) error {
	var was division
	if json.Unmarshal(from.Layout, &was) != nil {
		return damaged("layout", from)
	}
	is := t.cfg.division()
	if was.Sharded && was == is {
		return nil
	}
	l := was.Layout
	return fmt.Errorf("the checkpoint %s is of an earlier version and can only be loaded with sharded parameters on pp %d, vpp %d, ep %d, dp %d; resume there first, for one step or more, and then on any layout", from.Path, l.PP, l.VPP, l.EP, l.DP)
}

// files holds the open files of a checkpoint and finds the parts of tensors in them by the
// names of the tensors.
type files struct {
	open []*checkpoint.Tensors
	of   map[string][]part
	flat bool // the moments are those of shards, as earlier versions saved them
}

// part is a part of a tensor in a file.
type part struct {
	in      *checkpoint.Tensors
	name    string // in the file
	from, n int    // its first element in the tensor, and its elements
}

func openFiles(c *checkpoint.Checkpoint) (*files, error) {
	f := &files{of: map[string][]part{}}
	for i := range c.Ranks {
		for _, open := range []func(int) (*checkpoint.Tensors, error){c.Model, c.Optim} {
			ts, err := open(i)
			if err != nil {
				return f, err
			}
			f.open = append(f.open, ts)
			for _, x := range ts.Tensors() {
				name, from := tensorName(x.Name)
				f.of[name] = append(f.of[name], part{ts, x.Name, from, int(x.Bytes() / 4)})
				f.flat = f.flat || strings.HasPrefix(name, "rank0.")
			}
		}
	}
	for _, parts := range f.of {
		slices.SortFunc(parts, func(a, b part) int { return cmp.Compare(a.from, b.from) })
	}
	return f, nil
}

// tensorName returns the name of the tensor that a part in a file belongs to, and the
// part's first element; see momentPart.file.
func tensorName(part string) (name string, from int) {
	i := strings.LastIndexByte(part, '@')
	if i < 0 {
		return part, 0
	}
	from, err := strconv.Atoi(part[i+1:])
	if err != nil || from < 0 {
		return part, 0
	}
	return part[:i], from
}

func (f *files) close() (err error) {
	for _, ts := range f.open {
		err = errors.Join(err, ts.Close())
	}
	return err
}

// read reads elements from the given one on of the tensor with a name and a number of
// elements.
func (f *files) read(name string, of, from int, to []float32) error {
	parts := f.of[name]
	if parts == nil {
		return fmt.Errorf("train: the checkpoint has no tensor %s; resume from another one", name)
	}
	have := 0
	for _, p := range parts {
		x, _ := p.in.Tensor(p.name)
		if x.DType != safetensors.F32 || p.from != have {
			return fmt.Errorf("train: expected %d numbers of F32 in tensor %s of the checkpoint, got %v of shape %v at %d; resume from another one", of, name, x.DType, x.Shape, p.from)
		}
		have += p.n
	}
	if have != of {
		return fmt.Errorf("train: expected %d numbers of F32 in tensor %s of the checkpoint, got %d; resume from another one", of, name, have)
	}
	for _, p := range parts {
		first, last := max(from, p.from), min(from+len(to), p.from+p.n)
		if first >= last {
			continue
		}
		if err := p.in.ReadAt(p.name, bytesOf(to[first-from:last-from]), int64(4*(first-p.from))); err != nil {
			return err
		}
	}
	return nil
}

// resume loads the rank's parameters, router biases and optimiser state.
func (r *rank) resume(f *files) error {
	err := r.eachParam(func(k key, p layer.Param) error {
		x := make([]float32, p.Elements())
		for _, q := range pieces(p) {
			if err := f.read(q.name, q.n, 0, x[q.from:q.from+q.n]); err != nil {
				return err
			}
		}
		return r.store.load(k, x)
	})
	if err != nil {
		return err
	}
	put := func(name string, of, from int, to device.Range) error {
		x := make([]float32, to.Len/4)
		if err := f.read(name, of, from, x); err != nil {
			return err
		}
		r.s.Upload(to, bytesOf(x))
		return nil
	}
	for _, b := range r.balances {
		if b.Bias.Buf != nil {
			if err := put(biasName(b.name), b.experts, 0, b.Bias); err != nil {
				return err
			}
		}
	}
	moments := r.store.moments(true)
	if f.flat {
		moments = r.store.(*sharded).flat()
	}
	for _, m := range moments {
		if err := put(m.name, m.of, m.from, m.Range); err != nil {
			return err
		}
	}
	return r.s.Sync()
}
