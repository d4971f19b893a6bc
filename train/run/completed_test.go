// This file owns the tests of runs that were killed behind their last checkpoint, and of the
// process that completes them.

package run

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/train/internal/checkpoint"
	"github.com/stowage-dev/stowage/train/internal/disk"
	"github.com/stowage-dev/stowage/train/internal/disk/disktest"
)

// A run is killed, or the power fails, between its last step and the end: the one that
// completes it writes the summary of a run that nobody disturbed, with the forecasts and
// the choice for every group, and says nothing of options that had an effect. It removes what
// was left of old checkpoints.
func TestSummaryOfACompletedRun(t *testing.T) {
	o := tiny()
	o.Policy, o.Offload = "offload", []string{"expert_fc1"}
	type figures struct {
		Summary
		Step   float64              `json:"step_ms"`
		Traced string               `json:"traced"`
		Ranks  []report.RankSummary `json:"by_rank"`
	}
	summary := func(d *disktest.Disk) (f figures) {
		text, err := d.Contents("/disk/run/" + summaryName)
		if err == nil {
			err = json.Unmarshal(text, &f)
		}
		if err != nil {
			t.Fatal(err)
		}
		if f.Step == 0 || f.Seconds == 0 || f.Speed == 0 {
			t.Errorf("there are no times: %s", text)
		}
		f.Step, f.Seconds, f.Speed = 0, 0, 0
		for i := range f.Ranks {
			f.Ranks[i].Step = 0 // follows from measured times
		}
		return f
	}
	d := disktest.New()
	p := d.Process("run")
	first, err := attemptWith(p, o, false)
	if err != nil {
		t.Fatal(err)
	}
	want := summary(d)
	if want.Forecast == 0 || len(want.Ranks) != 1 || want.Ranks[0].Predicted == 0 || len(want.Ranks[0].Policy) == 0 {
		t.Fatalf("the summary of a whole run is %+v", want)
	}
	completed := 0
	for n := p.Ops(); ; n-- {
		d := disktest.New()
		p := d.Process("run")
		p.Arm(n, disktest.Kills)
		_, _ = attemptWith(p, o, false) // it is killed
		if n%2 == 0 {
			d.Lose(rand.New(rand.NewPCG(2, uint64(n))))
		}
		next := d.Process("next")
		if steps, err := checkpoint.Steps(checkpoint.Options{Dir: "/disk/run", FS: next}); err != nil || len(steps) == 0 || steps[len(steps)-1] < o.Steps {
			break
		}
		if f := (&folder{disk: next, dir: "/disk/run"}); completed > 0 {
			if _, ok := f.readSummary(o.Steps); ok {
				t.Errorf("killed at operation %d, the run calls itself finished", n)
			}
		}
		want := want
		if err := d.Spoil("/disk/run/"+summaryName, func(text []byte) []byte {
			unfinished, ok := bytes.CutSuffix(text, []byte("}\n"))
			if !ok || !bytes.Contains(text, []byte(`"finished": false`)) {
				return text
			}
			want.Traced = "in part"
			return append(unfinished, `, "traced": "in part"}`...)
		}); err != nil {
			t.Fatal(err)
		}
		got, err := attemptWith(next, o, true)
		if got := summary(d); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("killed at operation %d: %v\n%+v, want\n%+v", n, err, got, want)
		}
		if left := d.Names("/disk/run/checkpoints"); !got.idle && slices.ContainsFunc(left, func(name string) bool {
			return strings.HasPrefix(name, "tmp-") || strings.HasPrefix(name, "step-00000001")
		}) {
			t.Errorf("killed at operation %d: the folder of checkpoints has %v; want two checkpoints", n, left)
		}
		if !got.idle {
			completed++
			if fmt.Sprint(got.Notes) != fmt.Sprint(first.Notes) {
				t.Errorf("killed at operation %d: it says %v, want %v", n, got.Notes, first.Notes)
			}
		}
	}
	if completed < 3 {
		t.Errorf("%d runs were completed: the test sees too little", completed)
	}
}

// A run that was killed behind its last checkpoint had reruns: its figures have those of its
// metrics.
func TestRerunsOfACompletedRun(t *testing.T) {
	o := tiny()
	whole := disktest.New().Process("whole")
	if _, err := attemptWith(whole, o, false); err != nil {
		t.Fatal(err)
	}
	for n := whole.Ops(); n > 0; n-- {
		d := disktest.New()
		p := d.Process("run")
		p.Arm(n, disktest.Kills)
		_, _ = attemptWith(p, o, false) // it is killed
		next := d.Process("next")
		f := &folder{disk: next, dir: "/disk/run"}
		if _, finished := f.readSummary(o.Steps); finished {
			continue
		}
		text, err := d.Contents("/disk/run/" + metricsName)
		if err == nil {
			err = disk.WriteFile(next, "/disk/run/"+metricsName, bytes.ReplaceAll(text, []byte(`"reruns":0`), []byte(`"reruns":3`)))
		}
		if err != nil {
			t.Fatal(err)
		}
		if s, err := attemptWith(next, o, true); err != nil || s.Reruns != 3 || !s.Finished {
			t.Errorf("%+v, %v; want three reruns", s, err)
		}
		return
	}
	t.Error("no run was killed before its end")
}

// A run was killed behind its last checkpoint, and a process on other ranks completes it: that
// one does no step, so the peaks stay those of the metrics.
func TestPeaksOfACompletedRun(t *testing.T) {
	for _, stages := range [][2]int{{2, 1}, {1, 2}} {
		d, o := disktest.New(), tiny()
		o.PP, o.Steps = stages[0], 1
		want, err := attemptWith(d.Process("run"), o, false)
		if err == nil {
			err = d.Spoil("/disk/run/"+summaryName, func(text []byte) []byte {
				return bytes.Replace(text, []byte(`"finished": true`), []byte(`"finished": false`), 1)
			})
		}
		if err != nil {
			t.Fatal(err)
		}
		o.PP = stages[1]
		p := d.Process("next")
		got, err := attemptWith(p, o, true)
		if err != nil || got.idle || got.Device != want.Device || got.Host != want.Host {
			t.Errorf("from %d stages to %d: %+v, %v; want peaks of %d and %d", stages[0], stages[1], got, err, want.Device, want.Host)
		}
		f, err := (&folder{disk: p, dir: "/disk/run"}).readSummaryFile()
		most := int64(0)
		for _, r := range f.Ranks {
			most = max(most, r.Device)
		}
		if err != nil || f.Device != want.Device || most > want.Device || len(f.Ranks) == 0 {
			t.Errorf("from %d stages to %d: summary.json has a peak of %d, and %d of a rank of %d, %v; want %d", stages[0], stages[1], f.Device, most, len(f.Ranks), err, want.Device)
		}
	}
}
