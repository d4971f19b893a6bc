// This file owns checkpoints: the names of tensors, saving and resuming.

package train

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/checkpoint"
	"github.com/stowage-dev/stowage/train/internal/checkpoint/safetensors"
	"github.com/stowage-dev/stowage/train/internal/data"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// piece is a part of a parameter with its own name in a checkpoint: the whole parameter,
// or the matrix of one expert.
type piece struct {
	name       string
	from, n    int
	rows, cols int
}

// pieces returns the pieces of a parameter. The name of an expert's piece contains the
// expert's number in the layer, so that a checkpoint does not depend on the layout.
func pieces(p layer.Param) []piece {
	if !p.Expert {
		return []piece{{p.Name, 0, p.Elements(), p.Rows, p.Cols}}
	}
	out := make([]piece, p.Count)
	n, rows := p.Elements()/p.Count, p.Rows/p.Count
	for i := range out {
		name := strings.Replace(p.Name, "experts.", fmt.Sprintf("experts.%d.", p.First+i), 1)
		out[i] = piece{name, i * n, n, rows, p.Cols}
	}
	return out
}

// identity holds the settings that must be equal for a resumed run to be bit-exact.
type identity struct {
	Model    *model.Model `json:"model"`
	Number   string       `json:"number"`
	Settings any          `json:"settings"`
	Batch    Batch        `json:"batch"`
	Optim    Optim        `json:"optim"`
	Seed     uint64       `json:"seed"`
	Dispatch string       `json:"dispatch"`
}

// division describes how a run is divided over ranks.
type division struct {
	Layout  Layout `json:"layout"`
	Sharded bool   `json:"sharded"`
	// GradComm is the format in which gradients of sharded parameters are reduced.
	GradComm string `json:"grad_comm,omitempty"`
}

func (c *Config) identity() identity {
	return identity{c.Model, numberName(c.Number), c.Settings, c.Batch, c.Optim, c.Seed, c.Dispatch.String()}
}

func numberName(n kernels.Number) string {
	return [...]string{kernels.F32: "fp32", kernels.BF16: "bf16"}[n]
}

func (c *Config) division() division {
	if c.Sharding == nil {
		return division{Layout: c.Layout}
	}
	return division{c.Layout, true, numberName(c.Sharding.GradComm)}
}

// heldTensor is a tensor in host memory.
type heldTensor struct {
	safetensors.Tensor
	data []float32
}

// snapshot holds the tensors that one rank saves.
type snapshot struct{ model, optim []heldTensor }

// Save writes a checkpoint of the parameters and the optimiser after the last step.
func (t *Trainer) Save(to *checkpoint.Store) error {
	if t.broken != nil {
		return t.broken
	}
	snaps := make([]snapshot, len(t.ranks))
	if err := t.each(func(i int) (err error) {
		snaps[i], err = t.ranks[i].snapshot()
		return err
	}); err != nil {
		return err
	}
	meta := checkpoint.Meta{Step: t.step}
	for _, x := range []struct {
		to   *json.RawMessage
		from any
	}{{&meta.Layout, t.cfg.division()}, {&meta.Config, t.cfg.identity()}, {&meta.Data, t.loader.State()}} {
		text, err := json.Marshal(x.from)
		if err != nil {
			return err
		}
		*x.to = text
	}
	ranks := make([]checkpoint.Rank, len(snaps))
	for i, s := range snaps {
		ranks[i] = checkpoint.Rank{Model: shardOf(s.model), Optim: shardOf(s.optim)}
	}
	return to.Save(meta, ranks)
}

func shardOf(ts []heldTensor) (s checkpoint.Shard) {
	for _, t := range ts {
		s.Tensors = append(s.Tensors, t.Tensor)
	}
	s.Write = func(w *safetensors.Writer) error {
		for _, t := range ts {
			if err := w.Write(t.Name, bytesOf(t.data)); err != nil {
				return err
			}
		}
		return nil
	}
	return s
}

func held(name string, data []float32, shape ...int) heldTensor {
	return heldTensor{safetensors.Tensor{Name: name, DType: safetensors.F32, Shape: shape}, data}
}

// snapshot copies the tensors that this rank saves to the host. If several ranks hold a
// tensor, one of them saves it.
func (r *rank) snapshot() (s snapshot, err error) {
	err = r.eachParam(func(k key, p layer.Param) error {
		x, err := r.store.read(k)
		if err != nil || !r.writes(p) {
			return err
		}
		for _, q := range pieces(p) {
			s.model = append(s.model, held(q.name, x[q.from:q.from+q.n], q.rows, q.cols))
		}
		return nil
	})
	if err != nil {
		return s, err
	}
	for _, b := range r.balances {
		if b.Bias.Buf == nil || r.dp != 0 {
			continue
		}
		x := make([]float32, b.experts)
		if err := r.s.Download(bytesOf(x), b.Bias); err != nil {
			return s, err
		}
		s.model = append(s.model, held(biasName(b.name), x, b.experts))
	}
	for _, m := range r.store.moments(false) {
		x := make([]float32, m.Len/4)
		if err := r.s.Download(bytesOf(x), m.Range); err != nil {
			return s, err
		}
		s.optim = append(s.optim, held(m.name, x, len(x)))
	}
	return s, nil
}

func biasName(layer string) string { return layer + "mlp.router.expert_bias" }

// Resume loads a checkpoint, so that the next step continues the saved run bit for bit. It
// returns an error if a setting differs that would change the results, or if the
// checkpoint cannot be read. Call it before the first step.
func (t *Trainer) Resume(from *checkpoint.Checkpoint) (err error) {
	if err := t.resumable(from); err != nil {
		return err
	}
	f, err := openFiles(from)
	defer func() { err = errors.Join(err, f.close()) }()
	if err != nil {
		return err
	}
	err = t.each(func(i int) error { return t.ranks[i].resume(f) })
	if err != nil {
		t.broken = err
		return err
	}
	t.step = from.Step
	return nil
}

// resumable returns an error if the checkpoint's settings differ from the run's.
func (t *Trainer) resumable(from *checkpoint.Checkpoint) error {
	damaged := func(what string) error {
		return fmt.Errorf("the %s in %s cannot be read; resume from another checkpoint", what, from.Path)
	}
	var saved, mine map[string]any
	text, err := json.Marshal(t.cfg.identity())
	if err != nil {
		return err
	}
	if decode(from.Config, &saved) != nil || decode(text, &mine) != nil {
		return damaged("settings")
	}
	for _, name := range []string{"model", "number", "settings", "batch", "optim", "seed", "dispatch"} {
		if err := differs(name, saved[name], mine[name]); err != nil {
			return err
		}
	}
	var d division
	if json.Unmarshal(from.Layout, &d) != nil {
		return damaged("layout")
	}
	if err := d.differs(t.cfg.division()); err != nil {
		return err
	}
	var s data.State
	if json.Unmarshal(from.Data, &s) != nil {
		return damaged("state of the data")
	}
	return t.loader.Check(s)
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

// differs returns an error that names what keeps a run with the division o from resuming
// one with d, or nil.
func (d division) differs(o division) error {
	e := &memory.SettingError{Remedy: sameSettings}
	number := func(setting string, was, is int) {
		if e.Setting == "" && was != is {
			e.Setting, e.Asked, e.Problem = setting, fmt.Sprint(is), fmt.Sprintf("differs from the run's %d", was)
		}
	}
	number("DP", d.Layout.DP, o.Layout.DP)
	if d.Sharded || o.Sharded {
		if e.Setting == "" && d.Sharded != o.Sharded {
			e.Setting, e.Problem = "Sharding", fmt.Sprintf("differs: this run has %s, and the one to resume %s", o.parameters(), d.parameters())
		}
		number("PP", d.Layout.PP, o.Layout.PP)
		number("VPP", d.Layout.VPP, o.Layout.VPP)
		number("EP", d.Layout.EP, o.Layout.EP)
		if e.Setting == "" && d.GradComm != o.GradComm {
			e.Setting, e.Asked, e.Problem = "GradComm", o.GradComm, "differs from the run's "+d.GradComm
		}
	}
	if e.Setting == "" {
		return nil
	}
	return e
}

// parameters says how a run holds its parameters.
func (d division) parameters() string {
	if d.Sharded {
		return "sharded parameters"
	}
	return "whole parameters"
}

// files holds the open files of a checkpoint and finds them by the names of tensors.
type files struct {
	open []*checkpoint.Tensors
	of   map[string]*checkpoint.Tensors
}

func openFiles(c *checkpoint.Checkpoint) (*files, error) {
	f := &files{of: map[string]*checkpoint.Tensors{}}
	for i := range c.Ranks {
		for _, open := range []func(int) (*checkpoint.Tensors, error){c.Model, c.Optim} {
			ts, err := open(i)
			if err != nil {
				return f, err
			}
			f.open = append(f.open, ts)
			for _, x := range ts.Tensors() {
				f.of[x.Name] = ts
			}
		}
	}
	return f, nil
}

func (f *files) close() (err error) {
	for _, ts := range f.open {
		err = errors.Join(err, ts.Close())
	}
	return err
}

// read reads the tensor of a name into to.
func (f *files) read(name string, to []float32) error {
	ts := f.of[name]
	if ts == nil {
		return fmt.Errorf("train: the checkpoint has no tensor %s; resume from another one", name)
	}
	if x, _ := ts.Tensor(name); x.DType != safetensors.F32 || x.Bytes() != int64(4*len(to)) {
		return fmt.Errorf("train: expected %[4]d numbers of F32 in tensor %[1]s of the checkpoint, got %[2]v of shape %[3]v; resume from another one", name, x.DType, x.Shape, len(to))
	}
	return ts.ReadAt(name, bytesOf(to), 0)
}

// resume loads the rank's parameters, router biases and optimiser state.
func (r *rank) resume(f *files) error {
	err := r.eachParam(func(k key, p layer.Param) error {
		x := make([]float32, p.Elements())
		for _, q := range pieces(p) {
			if err := f.read(q.name, x[q.from:q.from+q.n]); err != nil {
				return err
			}
		}
		return r.store.load(k, x)
	})
	if err != nil {
		return err
	}
	put := func(name string, to device.Range) error {
		x := make([]float32, to.Len/4)
		if err := f.read(name, x); err != nil {
			return err
		}
		r.s.Upload(to, bytesOf(x))
		return nil
	}
	for _, b := range r.balances {
		if b.Bias.Buf != nil {
			if err := put(biasName(b.name), b.Bias); err != nil {
				return err
			}
		}
	}
	for _, m := range r.store.moments(true) {
		if err := put(m.name, m.Range); err != nil {
			return err
		}
	}
	return r.s.Sync()
}
