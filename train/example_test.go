// This file owns the example of the package.

package train_test

import (
	"fmt"
	"log"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train"
	"github.com/stowage-dev/stowage/train/internal/data"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// The example trains a small mixture of experts on two ranks, once for each of two memory
// policies. The policies use memory differently and give the same parameters.
func Example() {
	text, err := data.Open("") // the built-in text
	if err != nil {
		log.Fatal(err)
	}
	block := model.Layer{
		Attention: &model.Attention{Heads: 2, KVHeads: 1, HeadDim: 16, Rotary: true},
		MoE:       &model.MoE{Experts: 4, TopK: 2, Width: 32, Gated: true},
	}
	cfg := train.Config{
		Model:    &model.Model{Name: "example", Hidden: 32, Vocab: 256, MaxPositions: 64, Layers: []model.Layer{block, block}},
		Settings: layer.DefaultSettings(),
		Layout:   train.Layout{PP: 1, VPP: 1, EP: 2, DP: 2},
		Batch:    train.Batch{Micro: 1, Seq: 32, Microbatches: 2},
		Optim:    train.DefaultOptim(),
		Text:     text,
		Device:   func(int) (device.Device, error) { return cpu.Open(cpu.Options{}) },
	}
	var digests []string
	for _, policy := range []string{"none", "stash"} {
		if cfg.Memory, err = train.NamedMemory(policy, 0); err != nil {
			log.Fatal(err)
		}
		digest, err := trainSteps(cfg, 4)
		if err != nil {
			log.Fatal(err)
		}
		digests = append(digests, digest)
	}
	fmt.Println("same parameters:", digests[0] == digests[1])
	// Output:
	// same parameters: true
}

// trainSteps trains a number of steps and returns the digest of the parameters.
func trainSteps(cfg train.Config, steps int) (digest string, err error) {
	t, err := train.New(cfg)
	if err != nil {
		return "", err
	}
	defer func() {
		if end := t.Close(); err == nil {
			err = end
		}
	}()
	for t.StepsDone() < steps {
		if _, err := t.Step(); err != nil {
			return "", err
		}
	}
	return t.Digest()
}
