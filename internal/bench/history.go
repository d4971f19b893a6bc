// This file owns the history of results: which figures of a benchmark's JSON are kept,
// the file that keeps them by date, and the comparison of a result with the one before.

package bench

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/stowage-dev/stowage/device"
)

// Entry is one result in a history: a line of JSON.
type Entry struct {
	Date     string             `json:"date"`  // such as 2026-11-15
	Bench    string             `json:"bench"` // copy, stash, replay, pools, offload or train, or a script's name
	Hardware string             `json:"hardware"`
	Version  string             `json:"version"`
	Command  string             `json:"command"`
	Note     string             `json:"note,omitempty"`
	Figures  map[string]float64 `json:"figures"`
}

// Label is what a benchmark prints before its result, so that a history can tell how it
// was made.
type Label struct {
	Command string `json:"command"`
	Version string `json:"version"`
}

// printed is the part of the JSON of any benchmark that a history reads.
type printed struct {
	Label
	Device *device.Info `json:"device"`

	Copies []struct {
		Direction string  `json:"direction"`
		Via       string  `json:"via"`
		Size      int64   `json:"size"`
		GBps      float64 `json:"gbps"`
	} `json:"copies"`
	Ratio *float64 `json:"ratio"`

	Pair *float64 `json:"pair_us"`
	GBps *float64 `json:"gbps"`

	Total *struct {
		OverLive  float64 `json:"pool_over_live"`
		OverBound float64 `json:"pool_over_bound"`
	} `json:"total"`

	Models []struct {
		Weights   PoolSide `json:"weights"`
		Gradients PoolSide `json:"gradients"`
	} `json:"models"`

	StepRatio   *float64 `json:"step_ratio"`
	PeakRatio   *float64 `json:"peak_ratio"`
	OffloadStep *float64 `json:"offload_step_ms"`
	Utilisation *float64 `json:"link_utilisation"`
	Hidden      *float64 `json:"hidden_fraction"`

	// Scripts beside PyTorch (pytorch/bench) say themselves what is kept.
	Bench    string             `json:"bench"`
	Hardware string             `json:"hardware"`
	Figures  map[string]float64 `json:"figures"`
}

// trained is a row of a comparison of training under all policies.
type trained struct {
	Policy    string  `json:"policy"`
	Device    float64 `json:"peak_device_bytes"`
	StepRatio float64 `json:"step_ratio"`
	Speed     float64 `json:"tokens_per_second"`
	Sum       string  `json:"params_sha256"`
}

// errNoResult is returned for JSON that no benchmark printed.
var errNoResult = errors.New("expected the JSON of a benchmark or of a training comparison, got something else; record what bench copy, stash, pools or offload or train prints as JSON, or a script of pytorch/bench")

// ReadEntry reads the key figures from the JSON that a benchmark printed. It leaves Date
// empty, and Hardware, Version and Command if the JSON lacks them. It returns an error if
// no benchmark of this program prints such JSON.
func ReadEntry(text []byte) (e Entry, err error) {
	text = bytes.TrimSpace(text)
	if len(text) > 0 && text[0] == '[' {
		e.Bench = "train"
		if e.Figures, err = trainFigures(text); err != nil {
			return e, err
		}
		return e, e.check()
	}
	var p printed
	if err := json.Unmarshal(text, &p); err != nil {
		return e, errNoResult
	}
	e.Command, e.Version = p.Command, p.Version
	if p.Device != nil && p.Device.Backend != "cpu" {
		e.Hardware = p.Device.Name
	}
	e.Figures = map[string]float64{}
	switch {
	case p.Copies != nil && p.Ratio != nil:
		e.Bench = "copy"
		copyFigures(&p, e.Figures)
	case p.Pair != nil && p.GBps != nil && p.Ratio != nil:
		e.Bench = "stash"
		e.Figures["ratio"], e.Figures["gbps"] = *p.Ratio, *p.GBps
	case p.Total != nil && p.Total.OverBound > 0:
		e.Bench = "replay"
		e.Figures["pool_over_live"], e.Figures["pool_over_bound"] = p.Total.OverLive, p.Total.OverBound
	case p.Models != nil:
		e.Bench = "pools"
		poolFigures(&p, e.Figures)
	case p.OffloadStep != nil && p.StepRatio != nil && p.PeakRatio != nil && p.Utilisation != nil && p.Hidden != nil:
		e.Bench = "offload"
		e.Figures["offload_step_ms"], e.Figures["step_ratio"], e.Figures["peak_ratio"] = *p.OffloadStep, *p.StepRatio, *p.PeakRatio
		e.Figures["link_utilisation"], e.Figures["hidden_fraction"] = *p.Utilisation, *p.Hidden
	case p.Bench == "torch_moe" || p.Bench == "torch_kernels" || p.Bench == "torch_mamba":
		e.Bench, e.Hardware, e.Figures = p.Bench, p.Hardware, p.Figures
	}
	return e, e.check()
}

// check returns an error if the entry has no figures, or one that no benchmark can measure: copies that lengthen a step by
// more than they take hide less than nothing, and all others are not negative.
func (e *Entry) check() error {
	if e.Bench == "" || len(e.Figures) == 0 {
		return errNoResult
	}
	for name, x := range e.Figures {
		if math.IsNaN(x) || math.IsInf(x, 0) || x < 0 && name != "hidden_fraction" {
			return fmt.Errorf("the figure %s is %g; run the benchmark again", name, x)
		}
	}
	return nil
}

// copyFigures reads the speeds of the largest copies, by direction and way.
func copyFigures(p *printed, to map[string]float64) {
	to["ratio"] = *p.Ratio
	var largest int64
	for _, c := range p.Copies {
		largest = max(largest, c.Size)
	}
	for _, c := range p.Copies {
		if c.Size == largest {
			to[strings.ReplaceAll(c.Direction+"_"+c.Via, " ", "_")+"_gbps"] = c.GBps
		}
	}
}

// poolFigures reads the bytes of each kind of pool over the lower bound, of all models
// together.
func poolFigures(p *printed, to map[string]float64) {
	bound := map[string]float64{}
	for _, m := range p.Models {
		for side, s := range map[string]PoolSide{"weights": m.Weights, "gradients": m.Gradients} {
			for _, pool := range s.Pools {
				name := side + "_" + pool.Pool + "_over_bound"
				to[name] += float64(pool.Bytes)
				bound[name] += float64(s.Lower)
			}
		}
	}
	for name := range to {
		to[name] /= bound[name]
	}
}

// trainFigures reads the peak and the step time of every policy, and the speed of the
// first.
func trainFigures(text []byte) (map[string]float64, error) {
	var rows []trained
	if json.Unmarshal(text, &rows) != nil || len(rows) == 0 {
		return nil, errNoResult
	}
	to := map[string]float64{"tokens_per_second": rows[0].Speed}
	for _, r := range rows {
		if r.Policy == "" || r.Sum == "" || r.StepRatio <= 0 {
			return nil, errNoResult
		}
		to[r.Policy+"_peak_device_bytes"] = r.Device
		to[r.Policy+"_step_ratio"] = r.StepRatio
	}
	return to, nil
}

// ReadHistory reads the entries of a history, the oldest first. It returns an error that
// names the first line that is not an entry.
func ReadHistory(r io.Reader) (all []Entry, err error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for n := 1; lines.Scan(); n++ {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		d := json.NewDecoder(bytes.NewReader(lines.Bytes()))
		d.DisallowUnknownFields()
		var e Entry
		if err := d.Decode(&e); err != nil {
			return nil, fmt.Errorf("line %d is no entry of a history: %w; correct or remove it", n, err)
		}
		if _, err := time.Parse(time.DateOnly, e.Date); err != nil || e.check() != nil {
			return nil, fmt.Errorf("line %d is no entry of a history: it lacks a date, a benchmark or figures; correct or remove it", n)
		}
		all = append(all, e)
	}
	return all, lines.Err()
}

// Line returns the entry as the line that ReadHistory reads.
func (e Entry) Line() ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	err := enc.Encode(e)
	return b.Bytes(), err
}

// Previous returns the last entry of the history with the same benchmark, hardware and
// command, or nil if there is none.
func (e Entry) Previous(history []Entry) *Entry {
	for i := range slices.Backward(history) {
		if h := &history[i]; h.Bench == e.Bench && h.Hardware == e.Hardware && h.Command == e.Command {
			return h
		}
	}
	return nil
}

// noise is the change of a figure that means nothing on a machine with other work.
const noise = 0.03

// higherIsBetter reports whether a larger figure is the better one.
func higherIsBetter(name string) bool {
	for _, end := range []string{"_bytes", "_ms", "_over_bound", "_over_live", "step_ratio", "peak_ratio"} {
		if strings.HasSuffix(name, end) {
			return false
		}
	}
	return true
}

// verdict says whether a figure changed for the better.
func verdict(name string, before, now float64) string {
	switch ratio := now / before; {
	case before == now || math.Abs(ratio-1) <= noise:
		return "same"
	case (ratio > 1) == higherIsBetter(name):
		return "better"
	}
	return "worse"
}

// CompareText prints an entry beside the one before it, which may be nil.
func CompareText(w io.Writer, e Entry, before *Entry) {
	fmt.Fprintf(w, "%s on %s, %s\n", e.Bench, e.Hardware, e.Date)
	var names []string
	for name := range e.Figures {
		names = append(names, name)
	}
	slices.Sort(names)
	if before == nil {
		fmt.Fprintln(w, "the first entry of this command on this hardware")
		for _, name := range names {
			fmt.Fprintf(w, "  %-36s %12.6g\n", name, e.Figures[name])
		}
		return
	}
	fmt.Fprintf(w, "  %-36s %12s %12s %10s\n", "", before.Date, "now", "ratio")
	for _, name := range names {
		was, ok := before.Figures[name]
		if !ok {
			fmt.Fprintf(w, "  %-36s %12s %12.6g %10s  new\n", name, "-", e.Figures[name], "-")
			continue
		}
		ratio := "-"
		if was != 0 {
			ratio = fmt.Sprintf("%.3f", e.Figures[name]/was)
		}
		fmt.Fprintf(w, "  %-36s %12.6g %12.6g %10s  %s\n", name, was, e.Figures[name], ratio, verdict(name, was, e.Figures[name]))
	}
}
