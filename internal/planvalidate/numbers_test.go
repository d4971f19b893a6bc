package planvalidate

import (
	"strings"
	"testing"
)

// A number that cannot be is refused with the case and the key, and is neither used nor dropped.
func TestNumbers(t *testing.T) {
	const (
		job       = `{"id": "a", "gpu": "H100", "n_gpus": 8, "args": {"num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 8, "max-position-embeddings": 8, "micro-batch-size": 1, "global-batch-size": 8, "vocab-size": 50}, "measured": {"peak_GB": 3.5}}`
		published = `{"id": "b", "gpu": "H100", "n_gpus": 64, "model": {"name": "x", "layers": 4, "hidden": 64, "heads": 4, "vocab": 50, "ffn": 64}, "parallelism": {"TP": 2}, "batch": {"MBS": 1, "seq": 8}, "optimizer_offload_fraction": 0.5, "measured": {"peak_MiB_before": 300, "peak_MiB_after": 200, "per_pp_stage": [{"pp_rank": 0, "max_allocated_MiB": 200}]}}`
		row       = `{"model": "llama-3-8b", "System": "DGX-H100", "#-GPUs": 8, "GBS": "64", "MBS": 1, "Sequence Length": 4096, "TP": 1, "EP": "n/a", "FSDP": 0, "Tokens / sec / GPU": 9000}`
	)
	good := `{"cases": [` + job + `], "external_cases": [` + published + `], "throughput_rows": [` + row + `]}`
	if _, err := File([]byte(good), nil); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ old, other, says string }{
		{`"n_gpus": 8`, `"n_gpus": -8`, "case a: n_gpus is -8; it must be a whole number from 1"},
		{`"n_gpus": 8`, `"n_gpus": 0`, "case a: n_gpus is 0"},
		{`"n_gpus": 8`, `"n_gpus": 8.5`, "case a: n_gpus is 8.5"},
		{`"n_gpus": 8`, `"n_gpus": "8"`, `case a: n_gpus is "8"`},
		{`"n_gpus": 8`, `"n_gpus": 1e99`, "case a: n_gpus is 1e99"},
		{`"num-layers": 2`, `"num-layers": 2.5`, "case a: args.num-layers is 2.5"},
		{`"num-layers": 2`, `"num-layers": NaN`, "case a: args.num-layers is NaN"},
		{`"num-layers": 2`, `"num-layers": "two"`, "case a: args.num-layers is two"},
		{`"num-layers": 2`, `"num-layers": 99999999999999999999`, "case a: args.num-layers is 99999999999999999999"},
		{`"peak_GB": 3.5`, `"peak_GB": -3.5`, "case a: measured.peak_GB is -3.5; it must be a number above zero"},
		{`"peak_GB": 3.5`, `"peak_GB": 0`, "case a: measured.peak_GB is 0"},
		{`"peak_GB": 3.5`, `"peak_GB": "3.5"`, `case a: measured.peak_GB is "3.5"`},
		{`"peak_GB": 3.5`, `"peak_GB": Infinity`, `case a: measured.peak_GB is "Infinity"`},
		{`"peak_GB": 3.5`, `"peak_GB": 1e400`, "case a: measured.peak_GB is 1e400"},
		{`"peak_GB": 3.5`, `"mem_max_allocated_bytes_last": -1`, "case a: measured.mem_max_allocated_bytes_last is -1"},
		{`"id": "a", `, `"measured": 4, `, ""},
		{`"layers": 4`, `"layers": 4.5`, "case b: model.layers is 4.5; it must be a whole number from 1 to 16384"},
		{`"layers": 4`, `"layers": -4`, "case b: model.layers is -4"},
		{`"layers": 4`, `"layers": 1000000000`, "case b: model.layers is 1000000000"},
		{`"ffn": 64`, `"dense_layers": 9`, "case b: model.dense_layers is 9; it must be at most model.layers, which is 4"},
		{`"ffn": 64`, `"mla": 9`, "case b: model.mla is 9; it must be an object"},
		{`"name": "x"`, `"name": 9`, "case b: model.name is 9; it must be a string"},
		{`"gpu": "H100"`, `"gpu": 100`, "case a: gpu is 100; it must be a string"},
		{`"TP": 2`, `"TP": 0`, "case b: parallelism.TP is 0"},
		{`"seq": 8`, `"seq": "8k"`, `case b: batch.seq is "8k"`},
		{`: {"MBS": 1, "seq": 8}`, `: 8`, "case b: batch is 8; it must be an object"},
		{`"optimizer_offload_fraction": 0.5`, `"optimizer_offload_fraction": 1.5`, "case b: optimizer_offload_fraction is 1.5; it must be a number from 0 to 1"},
		{`"peak_MiB_after": 200`, `"peak_MiB_after": 300`, "case b: measured.peak_MiB_after is 300; it must be below measured.peak_MiB_before, which is 300"},
		{`"pp_rank": 0`, `"pp_rank": -1`, "case b: measured.per_pp_stage[0].pp_rank is -1"},
		{`"pp_rank": 0, `, ``, "case b: measured.per_pp_stage[0].pp_rank is null"},
		{`"max_allocated_MiB": 200`, `"max_allocated_MiB": -200`, "case b: measured.per_pp_stage[0].max_allocated_MiB is -200"},
		{`"id": "b", `, ``, ""},
		{`"MBS": 1, "Sequence`, `"MBS": -1, "Sequence`, "case 1 of throughput_rows: MBS is -1"},
		{`"Tokens / sec / GPU": 9000`, `"Tokens / sec / GPU": -9000`, "case 1 of throughput_rows: Tokens / sec / GPU is -9000"},
		{`"#-GPUs": 8`, `"#-GPUs": true`, "case 1 of throughput_rows: #-GPUs is true; it must be a number or text"},
		{`"Tokens / sec / GPU": 9000`, `"Tokens / sec / GPU": [9000]`, "case 1 of throughput_rows: Tokens / sec / GPU is [9000]"},
		{`"n_gpus": 64`, `"n_gpus": 64, "n_gpus": 8`, `line 1: the key "n_gpus" is there twice; leave one of them out`},
		{`"Tokens / sec / GPU": 9000`, `"Tokens / sec / GPU": 1e400`, "case 1 of throughput_rows: Tokens / sec / GPU is 1e400"},
	} {
		text := strings.Replace(good, c.old, c.other, 1)
		if text == good {
			t.Fatalf("%s is not there", c.old)
		}
		_, err := File([]byte(text), nil)
		if c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) || c.says == "" && strings.Contains(c.other, "4") != (err != nil) {
			t.Errorf("%s: %v, want %q", c.other, err, c.says)
		}
	}
	for _, list := range []string{"cases", "external_cases", "throughput_rows"} {
		_, err := File([]byte(`{"`+list+`": [null]}`), nil)
		if err == nil || err.Error() != "case 1 of "+list+" is null; it must be an object" {
			t.Error(err)
		}
	}
	r, err := File([]byte(`{"cases": [{"id": "a\nb"}, {}], "external_cases": [{"model": {"name": "Llama-3-8B, 0 layers"}, "n_gpus": 8}]}`), nil)
	if err != nil || len(r.Skipped) != 3 || r.Skipped[0].ID != "a b" || r.Skipped[1].ID != "2 of cases" || r.Skipped[2].Reason != "its name says 0 layers, and the model has 32" {
		t.Errorf("%+v, %v", r, err)
	}
	if _, err := File([]byte(`{"cases": [{"measured": {"peak_GB": 0}}]}`), nil); err == nil || !strings.Contains(err.Error(), "case 1 of cases: measured.peak_GB is 0") {
		t.Error(err)
	}
}
