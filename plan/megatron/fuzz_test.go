// This file owns the fuzzing of whole argument lists: what is accepted is valid, and its
// flags give it back.

package megatron

import (
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/input/inputtest"
)

func FuzzFromArgs(f *testing.F) {
	for _, s := range []string{
		"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel",
		"--hybrid-layer-pattern=M*E|-M/ME --pipeline-model-parallel-size 2",
		"--multi-latent-attention --q-lora-rank 8 --mtp-num-layers 2 --position-embedding-type rope",
		"--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --first-last-layers-bf16",
		"--use-megatron-fsdp --megatron-fsdp-max-pool-double-buffer --num-distributed-optimizer-instances 2",
		"--moe-layer-freq [0]*4+[1]*4 --recompute-granularity selective --recompute-modules moe_act layernorm",
		"--window-size 127,0 --window-attn-skip-freq 2 --softmax-type learnable",
		"--experimental-attention-variant gdn --linear-attention-freq 4",
		"--cpu-offloading-num-layers 2 --cuda-graph-impl local",
		"--expert-model-parallel-size 99999999 --context-parallel-size 99999999 --nproc-per-node 99999999 --nnodes 99999999",
		"--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-paged-stash --moe-expert-rank-capacity-factor 1.5",
		"--fp16 --bf16 false --cp-comm-type a2a p2p --padded-vocab-size 512",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		defer inputtest.Bound(t, len(text))()
		given, err := parseCommand(text, ParseOptions{})
		if err != nil {
			return
		}
		args := small("global-batch-size", nil)
		for name, v := range given {
			args[name] = v
		}
		s, _, err := FromArgs(args, Options{})
		if err != nil {
			if strings.ContainsRune(err.Error(), '\n') && !strings.ContainsRune(text, '\n') {
				t.Fatalf("more than a sentence: %v", err)
			}
			return
		}
		checkStages(t, s)
		if len(Unsaid(s)) > 0 {
			return
		}
		again, _, err := FromArgs(asArgs(t, s), Options{GPUs: s.Layout.World})
		if err != nil {
			t.Fatalf("%s: %v", CommandLine(Flags(s)), err)
		}
		compareSetups(t, s, again)
	})
}
