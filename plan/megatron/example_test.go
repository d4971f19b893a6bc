// This file owns the example.

package megatron_test

import (
	"fmt"
	"log"
	"slices"

	"github.com/stowage-dev/stowage/plan/megatron"
)

// Read a command line, choose a module to recompute, and print the flags for it.
func Example() {
	args, err := megatron.Parse("train.sh", []byte(`torchrun --nproc-per-node 8 pretrain_gpt.py \
		--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 \
		--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 \
		--tensor-model-parallel-size 2 --sequence-parallel --bf16`), megatron.ParseOptions{})
	if err != nil {
		log.Fatal(err)
	}
	s, warnings, err := megatron.FromArgs(args, megatron.Options{})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(s.Layout.World, "GPUs, TP", s.Layout.TP, "DP", s.Layout.DP())
	for _, w := range warnings {
		fmt.Println(w)
	}
	s.Recompute.Modules = []string{"core_attn"}
	flags := megatron.Flags(s)
	at := slices.Index(flags, "--recompute-modules")
	fmt.Println(flags[at : at+2])
	// Output:
	// 8 GPUs, TP 2 DP 4
	// [--recompute-modules core_attn]
}
