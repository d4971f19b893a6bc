// This file owns saving: the names of tensors in a checkpoint, and what each rank saves.

package train

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"

	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/checkpoint"
	"github.com/stowage-dev/stowage/train/internal/checkpoint/safetensors"
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

// identity holds the settings that a resumed run must share with the saved one. Micro and
// Microbatches may differ if the sequences of a step are the same.
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
type snapshot struct {
	model, optim []heldTensor
	memory       []float32 // of most of them
}

// kept is the host memory of a snapshot from one save to the next: to get memory takes longer than to
// fill it. It is nil while a snapshot has it.
type kept struct {
	mu     sync.Mutex
	memory []float32
}

func (k *kept) take(n int) []float32 {
	k.mu.Lock()
	defer k.mu.Unlock()
	m := k.memory
	if k.memory = nil; len(m) < n {
		m = make([]float32, n)
	}
	return m
}

func (k *kept) give(m []float32) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.memory = m
}

// Save copies the parameters and the optimiser's state to host memory and gives them to a
// target, which writes them before or after Save returns. If ranks live in several
// processes, all must call it, each with a target for its own ranks.
func (t *Trainer) Save(to checkpoint.Target) error {
	if t.broken != nil {
		return t.broken
	}
	ranks := make([]checkpoint.Rank, len(t.ranks))
	if _, err := t.together(func(i int) (f figures, err error) {
		r := t.ranks[i]
		s, err := r.snapshot()
		ranks[i] = checkpoint.Rank{Index: r.index, Model: shardOf(s.model), Optim: shardOf(s.optim)}
		write := ranks[i].Optim.Write
		ranks[i].Optim.Write = func(w *safetensors.Writer) error { // the last that is written
			err := write(w)
			r.kept.give(s.memory)
			return err
		}
		return f, err
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
	moments, n := r.store.moments(false), 0
	for _, m := range moments {
		n += int(m.Len / 4)
	}
	if r.cfg.Sharding == nil {
		_ = r.eachParam(func(_ key, p layer.Param) error {
			if r.writes(p) {
				n += p.Elements()
			}
			return nil
		})
	}
	s.memory = r.kept.take(n)
	rest := s.memory
	err = r.eachParam(func(k key, p layer.Param) error {
		mine := r.writes(p)
		if !mine && r.cfg.Sharding == nil { // sharded parameters are gathered by all
			return nil
		}
		x, err := r.store.read(k, rest)
		if err != nil || !mine {
			return err
		}
		if r.cfg.Sharding == nil {
			rest = rest[len(x):]
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
	for _, m := range moments {
		x := rest[:m.Len/4]
		rest = rest[len(x):]
		if err := r.s.Download(bytesOf(x), m.Range); err != nil {
			return s, err
		}
		s.optim = append(s.optim, held(m.file(), x, len(x)))
	}
	return s, nil
}

func biasName(layer string) string { return layer + "mlp.router.expert_bias" }
