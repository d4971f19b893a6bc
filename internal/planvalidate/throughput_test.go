package planvalidate

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
)

// How near forecasts of throughput must be to what was published, by kind.
func TestThroughputAccuracy(t *testing.T) {
	r := report(t)
	if len(r.Throughput) < 125 || len(r.Throughput)+len(r.TimeSkipped) != 155 {
		t.Errorf("%d rows modelled, %d skipped", len(r.Throughput), len(r.TimeSkipped))
	}
	if r.TimeMeanAbsError > 0.048 || math.Abs(r.TimeWorst) > 0.213 {
		t.Errorf("mean absolute error %.4f, worst %.4f; want at most 0.048 and 0.213", r.TimeMeanAbsError, r.TimeWorst)
	}
	kinds := map[string]float64{"dense": 0.048, "fsdp": 0.047, "hybrid": 0.065, "moe": 0.0475}
	for _, k := range r.TimeKinds {
		if limit, ok := kinds[k.Kind]; !ok || k.MeanAbsError > limit {
			t.Errorf("%s: mean absolute error %.4f, want at most %.3f", k.Kind, k.MeanAbsError, limit)
		}
	}
	if len(r.TimeKinds) != len(kinds) {
		t.Errorf("kinds %+v", r.TimeKinds)
	}
}

// row is a row of throughput in JSON with some values replaced.
func throughputRow(replace string) string {
	row := map[string]any{
		"release": "26.06 NeMo Container", "model": "LLAMA3.1_405B", "System": "DGX-GB300", "#-GPUs": "256", "Precision": "FP8",
		"GBS": "1536", "MBS": "1", "Sequence Length": "8192", "TP": "4", "PP": "8", "CP": "1", "VP": "4", "EP": "n/a",
		tokensKey: "1048", tflopsKey: "2646",
	}
	if err := json.Unmarshal([]byte("{"+replace+"}"), &row); err != nil {
		panic(err)
	}
	text, err := json.Marshal(row)
	if err != nil {
		panic(err)
	}
	return fmt.Sprintf(`{"throughput_rows":[%s]}`, text)
}

// A file may have nothing but rows of throughput. Numbers may be text or not. A row of an
// unknown release is predicted as it is stated.
func TestThroughputRows(t *testing.T) {
	first := ""
	for _, replace := range []string{``, `"MBS":1,"GBS":1536,"Tokens / sec / GPU":1048`, `"release":"my own run"`} {
		r, err := File([]byte(throughputRow(replace)), nil)
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Throughput) != 1 || len(r.TimeSkipped) != 0 || r.Cases != 0 {
			t.Fatalf("%s: %+v", replace, r)
		}
		row := r.Throughput[0]
		if row.Kind != "dense" || row.Measured != 1048 || row.Predicted < 500 || row.Predicted > 2000 ||
			r.TimeMeanAbsError != math.Abs(row.Error) || r.TimeWorst != row.Error {
			t.Errorf("%s: %+v", replace, r)
		}
		var text bytes.Buffer
		r.WriteText(&text)
		if !strings.Contains(text.String(), "1 of 1 runs modelled") || strings.Contains(text.String(), "cases modelled") {
			t.Errorf("%s: the text is %s", replace, text.String())
		}
		data, err := json.Marshal(r.JSON())
		if err != nil || !strings.Contains(string(data), `"time_mean_abs_error":`) || !strings.Contains(string(data), `"predicted_tokens_per_gpu_s":`) {
			t.Errorf("%s: the JSON is %s, %v", replace, data, err)
		}
		if replace == "" {
			first = string(data)
		} else if strings.Contains(replace, "MBS") && string(data) != first {
			t.Errorf("numbers gave %s, text %s", data, first)
		}
	}
}

// A row that cannot be predicted is skipped, and the reason says what is missing.
func TestThroughputSkips(t *testing.T) {
	for replace, want := range map[string]string{
		`"model":"Mystery 9B"`:                          "no preset is known",
		`"System":"DGX-Z900"`:                           "no built-in hardware",
		`"Precision":"FP2"`:                             "none of BF16",
		`"TP":"four"`:                                   "must be a whole number",
		`"TP":"-4"`:                                     "must be a whole number",
		`"TP":"0"`:                                      "must be a whole number above zero",
		`"VP":"2"`:                                      "has no recipe of this layout",
		`"Tokens / sec / GPU":""`:                       "is not stated",
		`"Tokens / sec / GPU":"fast"`:                   "must be a number",
		`"Tokens / sec / GPU":"1e999"`:                  "must be a number",
		`"Model TFLOP / sec / GPU":"2646[^slow]"`:       `footnote "slow"`,
		`"Model TFLOP / sec / GPU":"1700"`:              "frozen",
		`"release":"mine","#-GPUs":"7"`:                 "7",
		`"release":"mine","GBS":"99999999999999999999"`: "must be a whole number",
		`"release":"mine","PP":"100000","TP":"1","#-GPUs":"100000"`: "at most 4096",
	} {
		r, err := File([]byte(throughputRow(replace)), nil)
		if err != nil {
			t.Fatal(err)
		}
		if len(r.TimeSkipped) != 1 || !strings.Contains(r.TimeSkipped[0].Reason, want) {
			t.Errorf("%s: %+v, want a reason with %q", replace, r.TimeSkipped, want)
		}
	}
}
