// This file owns --largest and --fewest-gpus: which values of a setting are tried, and the
// plan with the value that is found.

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/internal/planview"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
)

// planLargest are the values of --largest, each with the settings that say the same.
var planLargest = map[string][]string{
	"microbatch": {"mbs", "micro-batch-size"},
	"seq":        {"seq", "seq-length"},
	"layers":     {"num-layers", "encoder-num-layers"},
}

// Bounds of what is tried: sequences of a microbatch, tokens of a sequence, layers and GPUs.
const mostMicro, mostSeq, mostPlanLayers, mostPlanGPUs = 1 << 16, 1 << 24, 1 << 12, 1 << 16

// answer finds the value that the flags ask for and sets it. It returns nil if they ask for
// none.
func (f *planFlags) answer(cmd *cobra.Command, w *planWords) (*planview.Answer, error) {
	if f.largest == "" && !f.fewest {
		return nil, nil
	}
	if err := f.checkAsked(w); err != nil {
		return nil, err
	}
	if err := f.job.keepStdin(); err != nil {
		return nil, err
	}
	asked := &askedValue{f: f, w: w}
	base, err := asked.setup(0)
	if err != nil {
		return nil, err
	}
	if base.Hardware == nil && base.Budget == 0 {
		return nil, usagef("%s needs --gpu, --doctor or --budget, which say what fits", f.askedFlag())
	}
	q := planview.Question{Setup: asked.setup, Flags: asked.flags}
	of := *f
	of.job.gpus = max(of.job.gpus, base.Layout.World) // which --fewest-gpus finds
	if q.Search, err = of.searched(base); err != nil {
		return nil, err
	}
	if q.Search != planview.NoSearch && base.Hardware == nil {
		return nil, usagef("--search %s compares times, which needs --gpu; add it, or leave --search out", q.Search)
	}
	if asked.base, err = base.Normalise(); err != nil {
		return nil, planError(err)
	}
	m := measure(cmd, "planning")
	defer m.end()
	q.Progress = m.at
	a, err := asked.ask(q)
	var none *planview.NoneFits
	switch {
	case errors.As(err, &none) && none.Nearest.Problem != "":
		return nil, usagef("%s: %v", f.askedFlag(), none)
	case errors.As(err, &none):
		return nil, fmt.Errorf("%v; %s", none, noneRemedy(q.Search))
	case err != nil:
		return nil, err
	}
	asked.set(&f.job, w, a.Value)
	return a, nil
}

// noneRemedy says what to try if a job fits with no value.
func noneRemedy(over planview.SearchSpace) string {
	return map[planview.SearchSpace]string{
		planview.NoSearch: "add --search policy for a memory policy, or use another layout",
		planview.Policies: "use another layout, or add --search layout",
		planview.Layouts:  "use a GPU with more memory",
	}[over]
}

// askedFlag returns the flag that asks, as it is written.
func (f *planFlags) askedFlag() string {
	if f.fewest {
		return "--fewest-gpus"
	}
	return "--largest " + f.largest
}

// checkAsked returns an error if the flags ask for two values or for one that is given.
func (f *planFlags) checkAsked(w *planWords) error {
	if f.fewest {
		switch {
		case f.largest != "":
			return usagef("--largest and --fewest-gpus each ask for a value; keep one")
		case f.job.gpus > 0:
			return usagef("--fewest-gpus finds the number of GPUs; leave --gpus out")
		}
		return nil
	}
	names, ok := planLargest[f.largest]
	if !ok {
		return usagef("--largest %s is unknown; choose microbatch, seq or layers", f.largest)
	}
	for _, name := range names {
		if _, given := w.settings[name]; given {
			return usagef("--largest %s finds the value of --%s; leave that out", f.largest, name)
		}
	}
	return nil
}

// keepStdin reads standard input once, if a flag names it, because a job is made of it again
// for every value.
func (j *jobFlags) keepStdin() error {
	flag := j.stdinFlag()
	if flag == "" {
		return nil
	}
	data, err := j.readStdin(flag)
	if err != nil {
		return err
	}
	j.stdin = func() io.Reader { return bytes.NewReader(data) }
	return nil
}

// askedValue makes the job with each value that is tried.
type askedValue struct {
	f    *planFlags
	w    *planWords
	base *plan.Setup // as the command line has it
	args map[string]any
}

// set puts a value into the flags and settings of a job. Zero leaves them as they are.
func (x *askedValue) set(j *jobFlags, w *planWords, value int) {
	settings := maps.Clone(w.settings)
	switch word := []string{strconv.Itoa(value)}; {
	case value == 0:
	case x.f.fewest:
		j.gpus = value
	default:
		settings[planLargest[x.f.largest][0]] = word
		if x.morePositions(value) {
			settings["max-position-embeddings"] = word
		}
	}
	w.settings = settings
}

// morePositions reports whether a sequence is longer than a file says that sequences are.
// Rotary positions allow that; Megatron-LM wants to be told.
func (x *askedValue) morePositions(value int) bool {
	return x.f.largest == "seq" && x.args["max-position-embeddings"] != nil && value > x.base.Model.MaxPositions
}

// flags returns what to write for a value.
func (x *askedValue) flags(value int) string {
	if x.f.fewest {
		return fmt.Sprintf("--gpus %d", value)
	}
	text := fmt.Sprintf("--%s %d", planLargest[x.f.largest][0], value)
	if x.morePositions(value) {
		text += fmt.Sprintf(" --max-position-embeddings %d", value)
	}
	return text
}

// setup returns the job with a value.
func (x *askedValue) setup(value int) (*plan.Setup, error) {
	j, w := x.f.job, *x.w
	x.set(&j, &w, value)
	s, _, err := j.setup(w)
	if err != nil {
		return nil, err
	}
	if value == 0 {
		x.args = j.args
	}
	if n := len(s.Model.Layers); value > 0 && x.f.largest == "layers" && n != value {
		return nil, fmt.Errorf("a pattern lists the %d layers of the model one by one", n)
	}
	return s, nil
}

// ask answers a question after it has chosen the values to try.
func (x *askedValue) ask(q planview.Question) (*planview.Answer, error) {
	l, b := x.base.Layout, x.base.Batch
	layouts := q.Search == planview.Layouts
	switch {
	case x.f.fewest:
		return x.askGPUs(q)
	case x.f.largest == "microbatch":
		q.Name, q.What = "largest microbatch", "microbatch"
		q.Step, q.Start, q.Most = 1, b.Micro, mostMicro
		if x.args["global-batch-size"] != nil {
			each, over := b.Global/l.DP(), fmt.Sprintf("leaves to each of %d replicas", l.DP())
			if layouts {
				each, over = b.Global, "has"
			}
			q.Values, q.End = divisorsOf(each), fmt.Sprintf("no larger one is possible: %d sequences are all that --gbs %d %s", each, b.Global, over)
		}
	case x.f.largest == "seq":
		q.Name, q.What = "longest sequence", "sequence"
		q.Step, q.Start, q.Most = leastMultiple(128, l.CP*l.TP), b.Seq, mostSeq
		if layouts {
			q.Step = 1024
		}
		if m := x.base.Model; m.LearnedPositions && m.MaxPositions > 0 {
			q.Most, q.End = m.MaxPositions, fmt.Sprintf("no longer one is possible: the model learns positions for %d tokens", m.MaxPositions)
			q.Step = min(q.Step, q.Most)
		}
	default:
		if x.args["pipeline-model-parallel-layout"] != nil {
			return nil, usagef("--largest layers cannot divide other numbers of layers as --layout does; leave the layout out")
		}
		q.Name, q.What = "most layers", "number of layers"
		q.Step, q.Start, q.Most = l.PP*l.VPP, len(x.base.Model.Layers), mostPlanLayers
		if layouts {
			q.Step = 1
		}
		if _, err := x.setup((q.Start/q.Step + 1) * q.Step); err != nil { // the file fixes their number
			return nil, usagef("--largest layers: another number of layers is not possible: %w", err)
		}
	}
	if q.End == "" {
		q.End = fmt.Sprintf("values above %d are not tried", q.Most/q.Step*q.Step)
	}
	return q.Answer()
}

// askGPUs asks for the smallest number of GPUs, with the layout of the command line or any.
func (x *askedValue) askGPUs(q planview.Question) (*planview.Answer, error) {
	q.Name, q.What, q.Smallest = "fewest GPUs", "number of GPUs", true
	if q.Search == planview.Layouts {
		return x.askLayouts(q)
	}
	l, b := x.base.Layout, x.base.Batch
	replica := l.TP * l.PP * l.CP
	unit := replica
	if slices.ContainsFunc(x.base.Model.Layers, func(y model.Layer) bool { return y.MoE != nil }) {
		unit = leastMultiple(replica, l.ETP*l.EP*l.PP)
	}
	q.Step, q.Start, q.Most = unit, unit, max(mostPlanGPUs/unit, 1)*unit
	if q.End = "fewer are not possible"; unit > 1 {
		q.End += fmt.Sprintf(": the layout needs a multiple of %d", unit)
	}
	if x.args["global-batch-size"] != nil {
		q.Values = []int{}
		for _, dp := range divisorsOf(max(b.Global/b.Micro, 1)) {
			if dp*replica%unit == 0 && dp*replica <= mostPlanGPUs {
				q.Values = append(q.Values, dp*replica)
			}
		}
		q.End = fmt.Sprintf("fewer are not possible: the layout needs a multiple of %d, and --gbs %d must divide over the replicas", unit, b.Global)
		if len(q.Values) == 0 {
			return nil, usagef("--fewest-gpus: no number of GPUs divides --gbs %d over replicas of %d GPUs; change --gbs or --mbs", b.Global, unit)
		}
	}
	return q.Answer()
}

// askLayouts tries every number of GPUs up to a node, and then multiples of a node. A layout
// may need an odd number, so of these any may fit. It begins where the GPUs together can
// hold the state of the parameters.
func (x *askedValue) askLayouts(q planview.Question) (*planview.Answer, error) {
	node := max(x.base.Layout.NodeGPUs, 1)
	least, state := x.leastGPUs()
	if least > node {
		least = (least + node - 1) / node * node
	}
	each := max(64*node, 4*least) / node * node // multiples of a node up to here
	for n := least; n <= each; {
		q.Values = append(q.Values, n)
		if n++; n > node {
			n = (n + node - 1) / node * node
		}
	}
	for n := 2 * each; n <= mostPlanGPUs; n *= 2 {
		q.Values = append(q.Values, n)
	}
	q.Step, q.End = 1, "fewer are not possible"
	q.Tried = fmt.Sprintf("multiples of %d up to %d and doublings of that", node, each)
	if least > 1 {
		q.End = fmt.Sprintf("fewer cannot hold weights, gradients and optimiser states, %s together", planview.Size(state))
	}
	if least < node {
		q.Tried = fmt.Sprintf("every number from %d to %d, %s", least, node, q.Tried)
	}
	return q.Answer()
}

// leastGPUs returns a number of GPUs below which no layout fits, and the state of the
// parameters that says so: layouts divide it, and no layout makes the sum of the parts
// smaller.
func (x *askedValue) leastGPUs() (int, memory.Bytes) {
	s := *x.base
	s.Layout = plan.Layout{World: 1, TP: 1, PP: 1, CP: 1, EP: 1, ETP: 1, VPP: 1, NodeGPUs: s.Layout.NodeGPUs}
	s.Recompute, s.Offload = plan.Recompute{}, plan.Offload{MinElements: s.Offload.MinElements}
	f, err := plan.Predict(&s)
	if err != nil || f.Budget < 1 {
		return 1, 0
	}
	var state memory.Bytes
	for _, it := range f.Ranks[0].Items {
		switch it.Cause {
		case plan.CauseWeights, plan.CauseGradients, plan.CauseOptimizer:
			state += it.Bytes
		}
	}
	return max(1, min(int((state+f.Budget-1)/f.Budget), mostPlanGPUs)), state
}

// divisorsOf returns the divisors of a number in ascending order.
func divisorsOf(n int) (out []int) {
	for d := 1; d <= n/d; d++ {
		if n%d != 0 {
			continue
		}
		if out = append(out, d); d != n/d {
			out = append(out, n/d)
		}
	}
	slices.Sort(out)
	return out
}

// leastMultiple returns the least common multiple of two numbers.
func leastMultiple(a, b int) int {
	x, y := a, b
	for y != 0 {
		x, y = y, x%y
	}
	return a / x * b
}

// largestWords returns the values of --largest.
func largestWords() []string { return slices.Sorted(maps.Keys(planLargest)) }
