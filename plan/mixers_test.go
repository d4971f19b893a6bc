// This file owns the tests of mixers that no preset has: attention beside Mamba, and
// lightning attention.

package plan

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// published returns a model of package model's test data.
func published(t testing.TB, name string) *model.Model {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("model", "testdata", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	m, err := model.ParseHF(data)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func savedBytes(s *Setup, l model.Layer) (n memory.Bytes) {
	for _, g := range Activations(s, l) {
		n += g.Bytes
	}
	return n
}

// Side by side, attention and Mamba save what they save alone, but the norm's input, output
// and statistics only once.
func TestParallelMixersShareTheNorm(t *testing.T) {
	const tokens, h = 1024, 512
	s := &Setup{
		Model:   &model.Model{Hidden: h, Vocab: 1000},
		Layout:  Layout{World: 1, TP: 1},
		Batch:   Batch{Micro: 1, Seq: tokens, Global: 1},
		Kernels: Kernels{Attention: "fused"},
	}
	a := &model.Attention{Heads: 8, KVHeads: 2, HeadDim: 64}
	m := &model.Mamba{Version: 2, Inner: 1024, Heads: 16, Groups: 1, State: 128, Conv: 4}
	both := model.Layer{Attention: a, Mamba: m}
	s.Model.Layers = []model.Layer{both}
	s = mustNormalise(t, s)
	norm := memory.Bytes(2*2*tokens*h + 4*tokens)
	if got, want := savedBytes(s, both), savedBytes(s, model.Layer{Attention: a})+savedBytes(s, model.Layer{Mamba: m})-norm; got != want {
		t.Errorf("side by side they save %d bytes, want %d", got, want)
	}
	bare := *m
	bare.Ungated = true
	if got, want := savedBytes(s, model.Layer{Mamba: m})-savedBytes(s, model.Layer{Mamba: &bare}), memory.Bytes(2*tokens*1024); got != want {
		t.Errorf("the norm behind the scan saves %d bytes, want %d", got, want)
	}
}

// Lightning attention saves the norm's input and output with their statistics, and ten
// tensors of the width of all heads: the product's three outputs, the three behind the
// activation function, the recurrence, its norm, the gate, and their product.
func TestLightningSaves(t *testing.T) {
	m := published(t, "minimax-text-01")
	s := mustNormalise(t, &Setup{Model: m, Layout: Layout{World: 8, TP: 2, EP: 8, ETP: 1}, Batch: Batch{Micro: 1, Seq: 4096, Global: 8}, Kernels: Kernels{Attention: "fused"}})
	l := model.Layer{Lightning: m.Layers[0].Lightning}
	const tokens, width = 4096, 64 * 128 / 2
	if got, want := savedBytes(s, l), memory.Bytes(2*2*tokens*6144+4*tokens+10*2*tokens*width); got != want {
		t.Errorf("it saves %d bytes, want %d", got, want)
	}
}

func TestPublishedMixturesArePlanned(t *testing.T) {
	files, err := filepath.Glob("model/testdata/*.json")
	if err != nil || len(files) < 10 {
		t.Fatalf("%d files: %v", len(files), err)
	}
	for _, f := range files {
		name := strings.TrimSuffix(filepath.Base(f), ".json")
		m := published(t, name)
		s := &Setup{Model: m, Layout: Layout{World: 64, TP: 2, PP: 2, EP: 8, ETP: 1}, Batch: Batch{Micro: 1, Seq: 4096}}
		if strings.HasPrefix(name, "falcon") {
			s.Layout.EP = 1
		}
		p, err := Predict(s)
		if name == "deepseek-v3.2" {
			if err == nil || !strings.Contains(err.Error(), "indexer") || !strings.Contains(err.Error(), "683.5B") {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for _, k := range p.Ranks {
			if k.Peak.Expected <= k.Static.Expected || k.Sum(CauseActivations) <= 0 {
				t.Errorf("%s: rank %d has a peak of %d and %d between steps", name, k.Rank, k.Peak.Expected, k.Static.Expected)
			}
		}
	}
	m := published(t, "falcon-h1-34b")
	_, err = Predict(&Setup{Model: m, Layout: Layout{World: 20, TP: 20}, Batch: Batch{Micro: 1, Seq: 64}})
	if err == nil || !strings.Contains(err.Error(), "heads") {
		t.Errorf("tp that divides no Mamba heads: %v", err)
	}
}
