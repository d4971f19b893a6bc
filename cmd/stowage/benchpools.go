// This file owns `stowage bench pools`: its flags, and what they mean together.

package main

import (
	"cmp"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/internal/bench"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/plan/model"
)

// poolModels are compared if no model is given: dense, MoE and hybrid ones.
var poolModels = []string{
	"llama-3-70b", "mixtral-8x22b", "deepseek-v3", "qwen3-235b-a22b", "jamba-1.5-large", "nemotron-h-56b", "nemotron-3-nano-30b-a3b",
}

func newBenchPools() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "pools",
		Short: "Compare the pools that sharded parameters are gathered into",
		Long: `Plan every kind of pool for the weights and the gradients of a model whose parameters
are sharded over data-parallel ranks (ZeRO-3). Compare the bytes of each pool on one rank
with the least that any pool needs: the largest set of buckets that is live at once.

A layer is an FSDP unit. Its weights are gathered --prefetch layers before their use and
released after it. Its gradients are reduced while as many later layers compute. The
parameters of a layer are in one bucket for each data type, and those of experts in
buckets of their own, as in Megatron-FSDP. The embedding, the output layer and what
surrounds the layers of MTP are no FSDP units: they are gathered when they are needed.

Nothing is allocated. The figures are the plans that sharded training follows.`,
		Example: `  stowage bench pools
  stowage bench pools --ep 8 --svg pools.svg
  stowage bench pools --model deepseek-v3 --prefetch 2 --ep 32
  stowage bench pools --model path/to/config.json --json`,
		Args: noArgs,
	}
	f := cmd.Flags()
	name := f.String("model", "", "`name` of a built-in model, or a Hugging Face config.json (default seven models, compared)")
	o := bench.PoolOptions{}
	f.IntVar(&o.Prefetch, "prefetch", 1, "`layers` to gather before their use")
	f.IntVar(&o.DP, "dp", 8, "`ranks` that the parameters are sharded over")
	f.IntVar(&o.TP, "tp", 1, "tensor-parallel `ranks`")
	f.IntVar(&o.EP, "ep", 1, "expert-parallel `ranks`")
	f.IntVar(&o.ETP, "etp", 0, "tensor-parallel `ranks` of an expert (default --tp)")
	f.IntVar(&o.Recompute, "recompute", 0, "`layers` to recompute together before their backward passes")
	f.BoolVar(&o.FP8, "fp8", false, "gather the matrices of linear layers in fp8")
	grads := f.String("grad-comm-dtype", "bf16", "data `type` in which gradients are reduced: bf16 or fp32")
	fallback := f.String("fallback", "persistent", "`kind` of memory for buckets outside of slots: persistent or dynamic")
	svg := f.String("svg", "", "write a bar chart to a `file`")
	p := reportFlag(cmd)
	asJSON := jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := checkPools(cmd, &o, *grads, *fallback); err != nil {
			return err
		}
		page := p()
		if err := checkFiles([]flagFile{{"svg", *svg}, {"report", page.Path()}}, flagFile{"model", *name}); err != nil {
			return err
		}
		models, err := loadPoolModels(cmd, *name)
		if err != nil {
			return err
		}
		if err := cmp.Or(checkRecompute(models, o.Recompute), checkHeads(models, o.TP)); err != nil {
			return err
		}
		if err := checkExperts(cmd, models, o); err != nil {
			return err
		}
		return benchPools(cmd, models, o, *svg, page, *asJSON)
	}
	return cmd
}

// checkPools fills in the options that are words, and returns an error if one is wrong.
func checkPools(cmd *cobra.Command, o *bench.PoolOptions, grads, fallback string) (err error) {
	f := cmd.Flags()
	if !f.Changed("etp") {
		o.ETP = o.TP
	}
	for _, x := range []struct {
		flag  string
		value int
	}{{"dp", o.DP}, {"tp", o.TP}, {"ep", o.EP}, {"etp", o.ETP}} {
		if x.value < 1 || x.value > 1<<20 {
			return usagef("--%s must be between 1 and %d, not %d", x.flag, 1<<20, x.value)
		}
	}
	switch {
	case o.Prefetch == 0:
		return usagef("--prefetch 0 leaves one buffer and the max-pool needs two; give at least 1, which is what --fsdp-double-buffer means")
	case o.Prefetch < 0 || o.Prefetch > 1000:
		return usagef("--prefetch must be between 1 and 1000, not %d", o.Prefetch)
	case o.Recompute < 0:
		return usagef("--recompute expects a number from 0, got %d", o.Recompute)
	}
	at := slices.IndexFunc(bench.PoolTypes, func(t bucket.Type) bool { return t.Name == grads })
	if at < 0 || grads == "fp8" {
		return usagef("--grad-comm-dtype must be bf16 or fp32, not %q", grads)
	}
	o.Gradients = bench.PoolTypes[at]
	if o.Fallback, err = bucket.ParseFallback(fallback); err != nil {
		return usagef("--fallback must be persistent or dynamic, not %q", fallback)
	}
	return nil
}

// checkExperts returns an error if --ep or --etp has no experts to divide, or if the ranks of
// --etp do not divide them.
func checkExperts(cmd *cobra.Command, models []*model.Model, o bench.PoolOptions) error {
	given := cmd.Flags().Changed("etp")
	switch none := !slices.ContainsFunc(models, hasExperts); {
	case none && o.EP > 1:
		return usagef("--ep %d has no experts of %s to divide; leave it out", o.EP, models[0].Name)
	case none && given && o.ETP > 1:
		return usagef("--etp %d has no experts of %s to divide; leave it out", o.ETP, models[0].Name)
	}
	for _, m := range models {
		for _, l := range m.Layers {
			if given && l.MoE != nil && l.MoE.Width%o.ETP != 0 {
				return usagef("--etp %d does not divide the width of an expert of %s, which is %d; choose one that does", o.ETP, m.Name, l.MoE.Width)
			}
		}
	}
	return nil
}

// checkHeads returns an error if tensor-parallel ranks do not divide the heads of a model.
func checkHeads(models []*model.Model, tp int) error {
	for _, m := range models {
		for _, l := range m.Layers {
			if l.Attention != nil && l.Attention.Heads%tp != 0 {
				return usagef("--tp %d does not divide the %d heads of %s; choose one that does", tp, l.Attention.Heads, m.Name)
			}
		}
	}
	return nil
}

// checkRecompute returns an error if more layers are recomputed together than the largest
// model has.
func checkRecompute(models []*model.Model, layers int) error {
	most := 0
	for _, m := range models {
		most = max(most, len(m.Layers))
	}
	if layers > most {
		return usagef("--recompute %d is more than the %d layers of the largest model; give fewer", layers, most)
	}
	return nil
}

func hasExperts(m *model.Model) bool {
	return slices.ContainsFunc(m.Layers, func(l model.Layer) bool { return l.MoE != nil })
}

// loadPoolModels loads the models to compare.
func loadPoolModels(cmd *cobra.Command, name string) (models []*model.Model, err error) {
	names := poolModels
	if cmd.Flags().Changed("model") {
		names = []string{name}
	}
	for _, n := range names {
		m, err := loadModel(n)
		if err != nil {
			return nil, err
		}
		models = append(models, m)
	}
	return models, nil
}

// loadModel loads a preset, or a model from a file or its folder.
func loadModel(name string) (*model.Model, error) {
	info, missing := os.Stat(name)
	if !strings.HasSuffix(name, ".json") && !strings.ContainsRune(name, os.PathSeparator) {
		m, err := model.Preset(name)
		if err == nil {
			return m, nil
		}
		if missing != nil {
			return nil, usagef("--model: %w", err)
		}
	}
	if missing == nil && info.IsDir() {
		name = filepath.Join(name, "config.json")
	}
	return readModel(name)
}

// readModel reads the config.json of a model.
func readModel(file string) (*model.Model, error) {
	data, err := input.ReadFile(file, input.Settings)
	if err != nil {
		return nil, usagef("--model %s: the file cannot be read: %w", file, input.Cause(err))
	}
	m, err := model.ParseHF(data)
	if err != nil {
		return nil, usagef("--model %s: %v; give a Hugging Face config.json", file, input.Plain(err))
	}
	m.Name = cmp.Or(m.Name, file)
	return m, nil
}

// benchPools compares the pools and prints the result.
func benchPools(cmd *cobra.Command, models []*model.Model, o bench.PoolOptions, svg string, p *bench.Page, asJSON bool) error {
	res, err := bench.ComparePools(models, o)
	if err != nil {
		return err
	}
	if svg != "" {
		if err := saveFile(flagFile{"svg", svg}, func(w io.Writer) error {
			_, err := w.Write(bench.PoolsSVG(res))
			return err
		}); err != nil {
			return err
		}
	}
	if !asJSON {
		bench.PoolsText(cmd.OutOrStdout(), res)
	} else if err := printResult(cmd, res); err != nil {
		return err
	}
	written(cmd, asJSON, "the chart is in", svg)
	return pageDone(cmd, p, asJSON, p.WritePools(res))
}
