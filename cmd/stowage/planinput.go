// This file owns the way from a command line to a job: which model, which
// hardware, which budget, how tokens are routed.

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/internal/spell"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/config"
	"github.com/stowage-dev/stowage/routing"
)

// jobFlags are the flags that describe a job, beside its settings.
type jobFlags struct {
	model, config, megatron string
	gpu                     string
	gpus, vocab             int
	budget, routing         string

	traced int // expert ranks of the trace that --routing names
}

// setup makes the job. Everything that is wrong with it is an error of usage.
func (j *jobFlags) setup(w planWords) (*plan.Setup, []string, error) {
	if len(w.rest) > 0 {
		if near := nearest(w.rest[0], []string{"explain", "ring", "validate"}); near != "" {
			return nil, nil, usagef("unexpected argument %q (did you mean %q?)", w.rest[0], near)
		}
		return nil, nil, usagef("unexpected argument %q", w.rest[0])
	}
	in := config.Input{Hardware: j.gpu, GPUs: j.gpus, Vocab: j.vocab, Settings: w.settings}
	var err error
	flag := ""
	if flag, in.Model, err = j.source(w.settings); err != nil {
		return nil, nil, err
	}
	if j.vocab < 0 || j.vocab > math.MaxInt32 {
		return nil, nil, usagef("--vocab %d must lie between 1 and %d", j.vocab, math.MaxInt32)
	}
	if j.budget != "" {
		n, err := parseSize(j.budget)
		if err != nil {
			return nil, nil, usagef("--budget: %v", err)
		}
		in.Budget = int64(n)
	}
	if err := j.route(in.Settings); err != nil {
		return nil, nil, err
	}
	s, notes, err := config.Resolve(in)
	if err != nil {
		// Below here all models are called --model.
		return nil, nil, planError(errors.New(strings.ReplaceAll(err.Error(), "--model "+in.Model, flag+" "+in.Model)))
	}
	for name := range w.settings {
		for _, n := range notes {
			// A file may have flags that nobody knows; on a command line they are slips.
			if strings.HasPrefix(n, "--"+name+": is not known") {
				return nil, nil, unknownSetting(name)
			}
		}
	}
	if n, err := s.Normalise(); err == nil && j.traced > 0 && n.Layout.EP*n.Layout.ETP != j.traced {
		notes = append(notes, fmt.Sprintf("the trace has %d expert ranks, the job %d; its imbalance of %.3g is taken as it is", j.traced, n.Layout.EP*n.Layout.ETP, n.Routing.Imbalance))
	}
	return s, notes, nil
}

// unknownSetting names the short word that was probably meant.
func unknownSetting(name string) error {
	var words []string
	for _, w := range config.Words {
		words = append(words, w.Short)
	}
	if near := nearest(name, words); near != "" && spell.Distance(name, near) <= 2 {
		return usagef("unknown flag --%s (did you mean --%s?)", name, near)
	}
	return usagef("unknown flag --%s", name)
}

// source is where the model comes from: one of three flags.
func (j *jobFlags) source(settings map[string][]string) (flag, name string, err error) {
	var found, flags []string
	for _, f := range []struct{ flag, value string }{{"--model", j.model}, {"--config", j.config}, {"--megatron", j.megatron}} {
		if f.value != "" {
			found, flags = append(found, f.value), append(flags, f.flag)
		}
	}
	switch {
	case len(found) == 0:
		for _, f := range []string{"model", "config", "megatron"} {
			for name := range settings {
				if spell.Distance(name, f) <= 2 {
					return "", "", usagef("unknown flag --%s (did you mean --%s?)", name, f)
				}
			}
		}
		return "", "", usagef("which model? give --model NAME, --config config.json or --megatron FILE, such as --model deepseek-v3")
	case len(found) > 1:
		return "", "", usagef("%s and %s both name a model; keep one", flags[0], flags[1])
	case flags[0] == "--model":
		return flags[0], found[0], nil
	}
	// A file is meant, even where a preset has the same name.
	info, err := os.Stat(found[0])
	if err == nil && info.IsDir() && flags[0] == "--config" {
		found[0] = filepath.Join(found[0], "config.json")
		info, err = os.Stat(found[0])
	}
	switch {
	case err != nil:
		return "", "", usagef("%s %s cannot be read: %v", flags[0], found[0], pathless(err))
	case info.IsDir():
		return "", "", usagef("%s %s is a folder; give a file in it", flags[0], found[0])
	}
	if !strings.ContainsRune(found[0], os.PathSeparator) {
		found[0] = "." + string(os.PathSeparator) + found[0]
	}
	return flags[0], found[0], nil
}

// route reads --routing.
func (j *jobFlags) route(settings map[string][]string) error {
	kind, value, _ := strings.Cut(j.routing, ":")
	if file, ok := settings["trace"]; ok {
		kind, value = "trace", strings.Join(file, " ")
		delete(settings, "trace")
	}
	if _, err := strconv.ParseFloat(kind, 64); err == nil {
		kind, value = "skewed", kind
	}
	switch kind {
	case "":
		return nil
	case "natural", "balanced":
		settings["routing"] = []string{kind}
		return nil
	case "skewed":
		if x, err := strconv.ParseFloat(value, 64); err != nil || !(x >= 1 && x <= 1e6) {
			return usagef("--routing skewed:%s: write the rows of the fullest expert rank over the mean, at least 1, such as skewed:1.3", value)
		}
		settings["routing"] = []string{value}
		return nil
	case "trace":
		x, ranks, err := traceImbalance(value)
		if err != nil {
			return usagef("--routing trace:%s: %v", value, err)
		}
		j.traced = ranks
		settings["routing"], settings["trace"] = []string{strconv.FormatFloat(x, 'g', -1, 64)}, []string{value}
		return nil
	}
	return usagef("--routing %s is unknown; write natural, balanced, skewed:1.3 or trace:FILE", j.routing)
}

// traceImbalance is how much fuller the fullest expert rank of a trace was than
// the mean. What counts for memory is a rank's layers together, since all of them
// are live at the peak; so rows are added up over layers before ranks are
// compared.
func traceImbalance(name string) (imbalance float64, ranks int, err error) {
	in, err := os.Open(name)
	if err != nil {
		return 0, 0, fmt.Errorf("the file cannot be read: %w", pathless(err))
	}
	defer in.Close()
	t, err := routing.Read(in)
	if err != nil {
		return 0, 0, err
	}
	h := t.Header
	var most routing.Rows
	for step := range t.Steps() {
		for microbatch := range h.Microbatches {
			for rank := range h.Ranks {
				var rows routing.Rows
				for layer := range h.Layers {
					rows += t.Rows(step, layer, microbatch, rank)
				}
				most = max(most, rows)
			}
		}
	}
	mean := float64(h.Total()) / float64(h.Ranks) * float64(h.Layers)
	return max(float64(most)/mean, 1), h.Ranks, nil
}

// planError makes an error of usage out of what the planner refuses: the packages'
// names mean nothing to a user, and the flag for hardware is --gpu here.
func planError(err error) error {
	text := typeless(err).Error()
	for _, name := range []string{"plan: ", "model: ", "validate: "} {
		text = strings.ReplaceAll(text, name, "")
	}
	return usagef("%s", strings.ReplaceAll(text, "--hardware", "--gpu"))
}

// typeless is an error about JSON in words of the file: what a field may be in
// this program means nothing to a user.
func typeless(err error) error {
	var typed *json.UnmarshalTypeError
	if !errors.As(err, &typed) {
		return err
	}
	why := fmt.Sprintf("an object is expected (found: %s)", typed.Value)
	if typed.Field != "" {
		why = fmt.Sprintf("%s has the wrong kind of value (%s)", typed.Field, typed.Value)
	}
	return errors.New(strings.Replace(err.Error(), typed.Error(), why, 1))
}

// pathless is an error of the file system without the name, which the sentence
// has already.
func pathless(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	return err
}
