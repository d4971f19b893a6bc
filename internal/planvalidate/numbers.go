// This file owns the check of a file's numbers. A case is skipped if it lacks something or if
// the planner does not model it. A number that cannot be is a mistake in the file, which is
// refused before anything is predicted.

package planvalidate

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/internal/input"
)

// mostCount bounds counts and mostLayers layers, so no product overflows. mostAmount bounds
// bytes: 2^50 are more than any device has.
const (
	mostCount  = math.MaxInt32
	mostLayers = 1 << 14
	mostAmount = 1 << 50
)

// least has the least value of the counts that a case states, by the key of their object.
var least = map[string]map[string]int64{
	"model": {
		"layers": 1, "hidden": 1, "ffn": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "vocab": 1, "experts": 0, "topk": 0, "moe_ffn": 0, "shared_ffn": 0, "dense_layers": 0,
	},
	"parallelism": {"TP": 1, "PP": 1, "CP": 1, "EP": 1, "ETP": 1, "VPP": 1, "DP": 1, "n_gpus": 1},
	"batch":       {"MBS": 1, "GBS": 1, "seq": 1},
	"mla":         {"q_lora": 0, "kv_lora": 1, "qk": 0, "rope": 0, "v": 1},
	"args": {
		"num-layers": 1, "hidden-size": 1, "num-attention-heads": 1, "seq-length": 1, "max-position-embeddings": 1, "micro-batch-size": 1, "global-batch-size": 1,
		"tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1, "context-parallel-size": 1, "expert-model-parallel-size": 1,
	},
	"row": {"#-GPUs": 1, "GBS": 1, "MBS": 1, "Sequence Length": 1, "TP": 1, "PP": 1, "CP": 1, "VP": 1, "EP": 1, "FSDP": 0},
}

// rowKeys are the keys of a row of throughput that are read.
var rowKeys = []string{"model", "System", "Precision", "release", "#-GPUs", "GBS", "MBS", "Sequence Length", "TP", "PP", "CP", "VP", "EP", "FSDP", tokensKey, tflopsKey}

// numbers checks the numbers of one case. It keeps the first error.
type numbers struct {
	name string // of the case
	err  error
}

// checkNumbers returns an error about the first number of a file that cannot be. It names the
// case and the key.
func checkNumbers(data []byte) error {
	var f struct {
		Cases    []map[string]any `json:"cases"`
		External []map[string]any `json:"external_cases"`
		Speeds   []map[string]any `json:"throughput_rows"`
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	if err := d.Decode(&f); err != nil {
		return fmt.Errorf("the file of cases is not JSON of the expected form: %w", input.Plain(err))
	}
	for _, list := range []struct {
		key   string
		cases []map[string]any
	}{{"cases", f.Cases}, {"external_cases", f.External}} {
		for i, c := range list.cases {
			place := position(i, list.key)
			if c == nil {
				return fmt.Errorf("case %s is null; it must be an object", place)
			}
			id, _ := c["id"].(string)
			n := &numbers{name: cmp.Or(id, place)}
			if n.check(c); n.err != nil {
				return n.err
			}
		}
	}
	for i, row := range f.Speeds {
		n := &numbers{name: position(i, "throughput_rows")}
		if row == nil {
			return fmt.Errorf("case %s is null; it must be an object", n.name)
		}
		for _, key := range slices.Sorted(maps.Keys(row)) { // a row with a wrong word is skipped
			if f, ok := number(row[key]); !ok && isNumber(row[key]) || f < 0 {
				n.fail(key, row[key], "a number from zero that is not too large")
			}
			if _, text := row[key].(string); slices.Contains(rowKeys, key) && !text && !isNumber(row[key]) && row[key] != nil {
				n.fail(key, row[key], "a number or text")
			}
		}
		if n.err != nil {
			return n.err
		}
	}
	return nil
}

// position names a case without a name.
func position(i int, list string) string { return fmt.Sprintf("%d of %s", i+1, list) }

func (n *numbers) fail(key string, v any, want string) {
	if n.err == nil {
		text, err := json.Marshal(v)
		if err != nil { // words in place of a number
			text = []byte(fmt.Sprint(v))
		}
		if len(text) > 40 {
			text = append(text[:40:40], "..."...)
		}
		n.err = fmt.Errorf("case %s: %s is %s; it must be %s", n.name, key, text, want)
	}
}

// check checks a case of Megatron-LM's tests or a published one.
func (n *numbers) check(c map[string]any) {
	for _, key := range []string{"id", "kind", "gpu", "precision", "settings", "fsdp", "note"} {
		if _, ok := c[key].(string); !ok && c[key] != nil {
			n.fail(key, c[key], "a string")
		}
	}
	n.count("n_gpus", c["n_gpus"], 1, mostGPUs)
	for _, key := range []string{"model", "parallelism", "parallelism_inferred", "batch", "args", "measured"} {
		object, ok := c[key].(map[string]any)
		if c[key] != nil && !ok {
			n.fail(key, c[key], "an object")
		}
		n.counts(strings.TrimSuffix(key, "_inferred"), key+".", object)
		if key == "model" {
			n.model(object)
		}
	}
	if v := c["optimizer_offload_fraction"]; v != nil {
		if f, ok := number(v); !ok || f < 0 || f > 1 {
			n.fail("optimizer_offload_fraction", v, "a number from 0 to 1")
		}
	}
	if m, ok := c["measured"].(map[string]any); ok {
		n.measured(m)
	}
}

// model checks what the counts of a published model do not show.
func (n *numbers) model(m map[string]any) {
	if _, ok := m["name"].(string); !ok && m["name"] != nil {
		n.fail("model.name", m["name"], "a string")
	}
	mla, ok := m["mla"].(map[string]any)
	if !ok && m["mla"] != nil {
		n.fail("model.mla", m["mla"], "an object")
	}
	n.counts("mla", "model.mla.", mla)
	layers, ok := number(m["layers"])
	if dense, has := number(m["dense_layers"]); ok && has && dense > layers {
		n.fail("model.dense_layers", m["dense_layers"], fmt.Sprintf("at most model.layers, which is %g", layers))
	}
}

// mostGPUs is the number of GPUs that Megatron-LM's arguments may ask for.
const mostGPUs = 1 << 24

// counts checks the counts of an object of a kind.
func (n *numbers) counts(kind, path string, object map[string]any) {
	for _, key := range slices.Sorted(maps.Keys(least[kind])) {
		v := object[key]
		if text, ok := v.(string); ok && kind == "args" {
			v = json.Number(strings.TrimSpace(text))
		}
		most := int64(mostCount)
		if strings.HasSuffix(key, "layers") {
			most = mostLayers
		}
		n.count(path+key, v, least[kind][key], most)
	}
}

// count checks a whole number, if it is there.
func (n *numbers) count(key string, v any, least, most int64) {
	if v == nil {
		return
	}
	text, ok := v.(json.Number)
	if x, err := strconv.ParseInt(string(text), 10, 64); !ok || err != nil || x < least || x > most {
		n.fail(key, v, fmt.Sprintf("a whole number from %d to %d", least, most))
	}
}

// amount checks a measured number, if it is there.
func (n *numbers) amount(key string, v any, unit float64) {
	if v == nil {
		return
	}
	if f, ok := number(v); !ok || f <= 0 || f*unit > mostAmount {
		n.fail(key, v, fmt.Sprintf("a number above zero and at most %.3g", mostAmount/unit))
	}
}

func isNumber(v any) bool {
	_, ok := v.(json.Number)
	return ok
}

// number returns a number of JSON. Text in quotes is none.
func number(v any) (float64, bool) {
	text, ok := v.(json.Number)
	if !ok {
		return 0, false
	}
	return input.Number(string(text))
}

// isRange reports whether a value is text such as 8-10, which published savings can be. They
// are not compared.
func isRange(v any) bool {
	text, ok := v.(string)
	return ok && strings.ContainsRune(strings.TrimLeft(text, "-+ "), '-')
}

// measured checks what is compared.
func (n *numbers) measured(m map[string]any) {
	for _, key := range slices.Sorted(maps.Keys(m)) {
		saver, saves := strings.CutSuffix(key, "_saves_GB")
		switch {
		case saves && recomputedBy(saver) != "" && !isRange(m[key]):
			n.amount("measured."+key, m[key], gb)
		case strings.HasPrefix(key, "mem_") && strings.Contains(key, "allocated_bytes_"):
			n.amount("measured."+key, m[key], 1)
		case key == "peak_MiB_before":
			n.amount("measured."+key, m[key], mib)
		}
	}
	for _, u := range units {
		n.amount("measured."+u.key, m[u.key], u.unit)
	}
	before, offloads := number(m["peak_MiB_before"])
	if after, ok := number(m["peak_MiB_after"]); ok && offloads && after >= before {
		n.fail("measured.peak_MiB_after", m["peak_MiB_after"], fmt.Sprintf("below measured.peak_MiB_before, which is %g", before))
	}
	stages, ok := m["per_pp_stage"].([]any)
	if m["per_pp_stage"] != nil && !ok {
		n.fail("measured.per_pp_stage", m["per_pp_stage"], "a list of objects")
	}
	for i, v := range stages {
		path := fmt.Sprintf("measured.per_pp_stage[%d]", i)
		stage, ok := v.(map[string]any)
		if !ok {
			n.fail(path, v, "an object")
			continue
		}
		if stage["pp_rank"] == nil {
			n.fail(path+".pp_rank", nil, "a whole number from 0")
		}
		n.count(path+".pp_rank", stage["pp_rank"], 0, mostCount)
		for _, key := range []string{"max_allocated_MiB", "max_reserved_MiB"} {
			n.amount(path+"."+key, stage[key], mib)
		}
	}
}
