package run

import (
	"context"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/profile"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/plan/cost"
)

// profiled runs steps under a profile.
func profiled(t *testing.T, steps int, dir string) (Summary, error) {
	t.Helper()
	p := &profile.Profiler{Measure: func() (profile.Limits, error) { return profile.Limits{Product: 2, Format: "fp32", Copy: 50}, nil }}
	o := tiny()
	o.Steps, o.Policy, o.SaveEvery = steps, "stash", 100
	m := machine()
	m.Open = func(_ int, w device.Observer) (device.Device, error) {
		d, err := cpu.Open(cpu.Options{Observe: w})
		if err != nil {
			return nil, err
		}
		return p.Wrap(d), nil
	}
	j, err := NewJob(o, m, nil)
	if err != nil {
		t.Fatal(err)
	}
	j.Profile = p
	return j.Run(context.Background(), dir, false, NewProgress(io.Discard, nil, nil))
}

// A profile has the kernels of a step with their operations, changes no parameter, and is
// in the summary, in its text and in the report.
func TestProfile(t *testing.T) {
	dir := t.TempDir() + "/run"
	s, err := profiled(t, 9, dir)
	if err != nil {
		t.Fatal(err)
	}
	o := tiny()
	o.Steps, o.Policy = 9, "stash"
	plain, err := jobOf(t, o).Run(context.Background(), "", false, NewProgress(io.Discard, nil, nil))
	if err != nil {
		t.Fatal(err)
	}
	p := s.Profile
	switch {
	case s.Digest != plain.Digest:
		t.Error("a profile changed the parameters")
	case p == nil:
		t.Fatal("there is no profile")
	case p.Steps != profiledSteps || p.Millis <= 0 || p.Plain <= 0 || p.Model <= 0 || p.MFU <= 0 || p.Work <= 0:
		t.Errorf("%+v", p)
	}
	for _, name := range []string{"gemm_plain", "grouped_plain", "attend_grad", "swiglu", "rmsnorm", "adamw"} {
		i := slices.IndexFunc(p.Kernels, func(k profile.Kernel) bool { return k.Name == name })
		if i < 0 {
			t.Errorf("%s is missing", name)
			continue
		}
		k := p.Kernels[i]
		product := !slices.Contains([]string{"swiglu", "rmsnorm", "adamw"}, name)
		if k.Launches < 1 || k.Millis <= 0 || k.GBps <= 0 || k.Limit <= 0 || product != (k.TFlops > 0) {
			t.Errorf("%+v", k)
		}
	}
	var text strings.Builder
	s.WriteText(&text)
	if !strings.Contains(text.String(), "MFU") || !strings.Contains(text.String(), p.Kernels[0].Name) {
		t.Error(text.String())
	}
	r, err := report.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if got := r.Runs[0].Profile; got == nil || len(got.Kernels) != len(p.Kernels) || got.MFU != p.MFU {
		t.Errorf("the report has %+v", got)
	}
}

// Too few steps are refused before anything is trained.
func TestProfileNeedsSteps(t *testing.T) {
	if _, err := profiled(t, leastProfiled-1, ""); err == nil || !isInput(err) || !strings.Contains(err.Error(), "1 more at least") {
		t.Error(err)
	}
	if s, err := profiled(t, leastProfiled, ""); err != nil || s.Profile == nil {
		t.Error(s, err)
	}
}

// The figures of a profile are those of the right steps, however many there are and wherever
// the run is stopped: the last ones are profiled, the first settle, and those between are the
// plain ones. Every size of a batch counts for its operations.
func TestProfileCountsSteps(t *testing.T) {
	j := jobOf(t, tiny())
	c := &j.config
	c.Layout.PP, c.Layout.DP, c.Batch.Micro, c.Batch.Microbatches = 2, 3, 5, 7
	tokens := float64(3 * 5 * 7 * c.Batch.Seq)
	for steps := leastProfiled; steps < leastProfiled+4; steps++ {
		for done := range steps + 1 {
			j.Profile = &profile.Profiler{}
			p, err := j.profile(steps)
			if err != nil {
				t.Fatal(err)
			}
			took := func(i int) float64 { return float64(1 + 7*i%13) } // all of one run differ
			for i := range done {
				p.begin(steps - i)
				if err := p.end(steps-i, took(i)); err != nil {
					t.Fatal(err)
				}
			}
			got := p.result(j)
			if done < steps {
				if got != nil {
					t.Errorf("%d of %d steps make the profile %+v", done, steps, got)
				}
				continue
			}
			var plain []float64
			for i := settleSteps; i < steps-profiledSteps; i++ {
				plain = append(plain, 1e3*took(i))
			}
			millis := 1e3 * (took(steps-3) + took(steps-2) + took(steps-1)) / 3
			want := profile.Result{Steps: 3, Millis: millis, Plain: median(plain), Ranks: 6, Flops: cost.TokenFlops(c.Model, c.Batch.Seq) * tokens}
			if got.Steps != want.Steps || got.Millis != want.Millis || got.Plain != want.Plain || got.Ranks != want.Ranks || got.Flops != want.Flops {
				t.Errorf("%d steps: %+v, want %+v", steps, *got, want)
			}
		}
	}
}
