// This file owns the tests of what a run keeps of the steps before, and restores if it
// fails at once.

package run

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/live"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/train/internal/data"
	"github.com/stowage-dev/stowage/train/internal/disk/disktest"
)

// A run that fails before its first step leaves all files as they were: also the lines of
// steps that it would have repeated, and the description of the machine.
func TestUndoRestoresFiles(t *testing.T) {
	j, err := NewJob(tiny(), machine(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	for what, lines := range map[string]string{
		"repeated":   `{"step":3,"loss":3}` + "\n" + `{"step":4,"lo`,
		"unreadable": "no line\n" + `{"step":2,"loss":2}` + "\n" + `{"step":3,"loss":3}` + "\n",
		"same":       "",
	} {
		d := disktest.New()
		p := d.Process("run")
		first := simulation{seed: 11, steps: 2}
		if first.run(p); first.err != nil {
			t.Fatal(first.err)
		}
		err := errors.Join(
			d.Spoil(simulated+"/"+metricsName, func(b []byte) []byte { return append(b, lines...) }),
			d.Spoil(simulated+"/"+report.EnvironmentFile, func([]byte) []byte { return []byte(`{"command":"before"}`) }))
		if err != nil {
			t.Fatal(err)
		}
		files := func() map[string]string {
			out := map[string]string{}
			for _, name := range d.Names(simulated) {
				text, err := d.Contents(simulated + "/" + name)
				if out[name] = string(text); err != nil {
					t.Fatal(err)
				}
			}
			return out
		}
		before := files()
		f, err := claim(p, simulated)
		if err != nil {
			t.Fatal(err)
		}
		o, err := resumeOptions(p, simulated)
		if err != nil {
			t.Fatal(err)
		}
		o.Steps = 9
		if err := f.begin(&o, 2, nil); err != nil {
			t.Fatal(err)
		}
		(&run{Job: j, folder: f, p: NewProgress(io.Discard, nil, nil)}).describe(true)
		if err := f.undo(); err != nil {
			t.Fatal(err)
		}
		d.Lose(nil)
		if after := files(); !maps.Equal(before, after) {
			t.Errorf("%s: %q became %q", what, before, after)
		}
	}
}

// Peaks are the highest of all lines, also of those that are dropped, for each rank.
func TestPeaksBefore(t *testing.T) {
	const text = `{"step":1,"rank_peaks":[{"peak_device_bytes":5,"peak_host_bytes":1},{"peak_device_bytes":2}]}` + "\n" +
		`{"step":2}` + "\n" + `{"step":3,"rank_peaks":[{"peak_device_bytes":4,"peak_host_bytes":3}]}` + "\n"
	d := disktest.New()
	f, err := claim(d.Process("run"), simulated)
	if err == nil {
		err = d.Spoil(simulated+"/"+metricsName, func([]byte) []byte { return []byte(text) })
	}
	if err != nil {
		t.Fatal(err)
	}
	o := DefaultOptions()
	if err := f.begin(&o, 2, nil); err != nil {
		t.Fatal(err)
	}
	if want := []peak{{5, 3}, {2, 0}}; !slices.Equal(f.was.peaks, want) || fullest(f.was.peaks) != (peak{5, 3}) {
		t.Errorf("peaks are %+v, want %+v", f.was.peaks, want)
	}
	if err := f.close(); err != nil {
		t.Error(err)
	}
}

// Lines that cannot be read are left out with one warning, and those behind them stay.
func TestBadMetrics(t *testing.T) {
	const good = `{"step":%d,"loss":%[1]d,"peak_device_bytes":%[1]d0}` + "\n"
	lines := func(steps ...int) (text string) {
		for _, n := range steps {
			if n == 0 {
				text += "{\x00 not a line\n"
			} else {
				text += fmt.Sprintf(good, n)
			}
		}
		return text
	}
	for _, x := range []struct {
		text string
		done int
		want string // what stays
		say  string
	}{
		{lines(1, 2, 3, 4), 4, lines(1, 2, 3, 4), ""},
		{lines(1, 2, 3, 4), 2, lines(1, 2), ""},
		{lines(1, 2, 3) + `{"step":4,"l`, 3, lines(1, 2, 3), ""},
		{lines(1, 0, 3, 4), 4, lines(1, 3, 4), "lacks 1 of the 4 steps before, because line 2 cannot be read"},
		{lines(1, 0, 3, 4), 3, lines(1, 3), "lacks 1 of the 3 steps before, because line 2 cannot be read"},
		{lines(0, 2, 0, 4, 5), 4, lines(2, 4), "lacks 2 of the 4 steps before, because 2 lines cannot be read: 1, 3;"},
		{lines(1, 2, 0), 2, lines(1, 2), ""}, // of a step that is repeated
		{lines(1, 2, 4), 4, lines(1, 2, 4), "lacks 1 of the 4 steps before;"},
		{lines(1, 3, 2, 4), 4, lines(1, 3, 2, 4), "line 3 is of step 2 and comes after step 3; the lines stay"},
		{lines(1, 2, 2, 3), 3, lines(1, 2, 2, 3), "line 3 is of step 2 and comes after step 2; the lines stay"},
		{lines(1, 3, 2), 3, lines(1, 3, 2), "line 3 is of step 2 and comes after step 3; the lines stay"},
		{lines(1, 4, 2, 3), 3, lines(1, 2, 3), "line 3 is of step 2 and comes after step 4; the lines stay"},
		{strings.Repeat("x", longestLine+5) + "\n" + lines(2), 2, lines(2), "because line 1 cannot be read"},
		{"", 2, "", "lacks 2 of the 2 steps before;"},
		{lines(0, 0, 0, 0, 0, 0, 7), 7, lines(7), "6 lines cannot be read: 1, 2, 3, 4, 5 and others;"},
	} {
		d := disktest.New()
		p := d.Process("run")
		f, err := claim(p, simulated)
		if err == nil {
			err = d.Spoil(simulated+"/"+metricsName, func([]byte) []byte { return []byte(x.text) })
		}
		if err != nil {
			t.Fatal(err)
		}
		o := DefaultOptions()
		var said []string
		if err := f.begin(&o, x.done, func(text string) { said = append(said, text) }); err != nil {
			t.Fatal(err)
		}
		last := x.done // whose line stays
		for last > 0 && !strings.Contains(x.want, fmt.Sprintf(good, last)) {
			last--
		}
		if f.was.loss != float64(last) {
			t.Errorf("of %.80q the loss is %g, want that of step %d", x.text, f.was.loss, last)
		}
		if err := errors.Join(f.record(line{Step: x.done + 1}), f.close()); err != nil {
			t.Fatal(err)
		}
		got, err := d.Contents(simulated + "/" + metricsName)
		if before, _, _ := strings.Cut(string(got), fmt.Sprintf(`{"step":%d,"loss":0,`, x.done+1)); err != nil || before != x.want {
			t.Errorf("of %.80q %q stays, want %q", x.text, got, x.want)
		}
		if len(said) > 1 || strings.Join(said, "") == "" != (x.say == "") || !strings.Contains(strings.Join(said, ""), x.say) {
			t.Errorf("of %.80q it says %q, want %q", x.text, said, x.say)
		}
	}
}

// A line of the metrics has the pages that all ranks spilled in its step, not those of the
// steps before.
func TestSpillsOfAStep(t *testing.T) {
	var a notes
	for i, x := range []struct {
		totals [2]int64
		want   int64
	}{{[2]int64{3, 0}, 3}, {[2]int64{5, 4}, 6}, {[2]int64{5, 4}, 0}, {[2]int64{6, 4}, 1}} {
		ranks := []memory.Summary{{Stash: &memory.StashCounts{Spilled: x.totals[0]}}, {}, {Stash: &memory.StashCounts{Spilled: x.totals[1]}}}
		if n := a.spills(ranks); n != x.want {
			t.Errorf("step %d spilled %d pages, want %d", i+1, n, x.want)
		}
	}
}

// Every figure that viewers see of a rank comes from its own source.
func TestRankForViewers(t *testing.T) {
	var u device.Usage
	u.Kind[memory.Device] = device.KindUsage{Current: 1, Peak: 2, Capacity: 3}
	u.Kind[memory.Host] = device.KindUsage{Current: 4, Peak: 5, Capacity: 6}
	s := memory.Summary{Counts: memory.CopyCounts{Out: 7, In: 8, OutBytes: 9, InBytes: 10, Evicted: 11, Late: 12}, Stash: &memory.StashCounts{Spilled: 13, Stashed: 14}}
	got := rankOf(u, s, peak{15, 16}, 17)
	want := live.Rank{Device: live.Memory{InUse: 1, Peak: 15, Capacity: 3, Budget: 17}, Host: live.Memory{InUse: 4, Peak: 16, Capacity: 6}, Out: 9, In: 10, Evicted: 11, Late: 12, Spilled: 13}
	if got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// The conclusion names the forecast that is furthest off, too high or too low.
func TestWorstForecast(t *testing.T) {
	row := func(name string, said int64) Row { return Row{Policy: name, Device: 1000, Forecast: said} }
	for _, x := range []struct {
		rows []Row
		want string
	}{
		{[]Row{row("a", 1000), row("b", 1049), row("c", 951)}, ""},
		{[]Row{row("a", 1060), row("b", 930)}, " The forecast for b is off by -7.0 %."},
		{[]Row{row("a", 1090), row("b", 930)}, " The forecast for a is off by +9.0 %."},
		{[]Row{row("a", 0), row("b", 930)}, ""}, // a is not known
	} {
		if got := worstForecast(x.rows); got != x.want {
			t.Errorf("%+v: %q, want %q", x.rows, got, x.want)
		}
	}
}

// An evaluation takes all batches of the held-out text, and at most four.
func TestBatchesOfAnEvaluation(t *testing.T) {
	for _, x := range []struct {
		bytes, want int
	}{{100, 1}, {129, 1}, {3 * 64, 2}, {4*64 + 16, 4}, {1000, 4}} {
		j := jobOf(t, tiny())
		j.Options.Micro, j.Options.Microbatches, j.Options.DP, j.Options.Seq, j.Options.HoldOut = 2, 2, 2, 8, 0.5
		j.config.Text = data.NewText("text", make([]byte, 2*x.bytes))
		if err := j.splitText(); err != nil || j.batches != x.want {
			t.Errorf("%d bytes are held out: %d batches, %v; want %d", x.bytes, j.batches, err, x.want)
		}
	}
}

// Only the summary of a run that finished after as many steps says that nothing is left.
func TestFinishedSummary(t *testing.T) {
	f, err := claim(disktest.New().Process("run"), "/disk")
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := f.readSummary(3); ok {
		t.Error("there is no summary")
	}
	for _, x := range []struct {
		s  Summary
		ok bool
	}{{Summary{Steps: 3, Finished: true}, true}, {Summary{Steps: 2, Finished: true}, false}, {Summary{Steps: 4, Finished: true}, false}, {Summary{Steps: 3}, false}} {
		if err := f.writeJSON(summaryName, x.s); err != nil {
			t.Fatal(err)
		}
		if s, ok := f.readSummary(3); ok != x.ok || s.idle != ok || s.Steps != x.s.Steps {
			t.Errorf("%+v is read as %+v, %v", x.s, s, ok)
		}
	}
}
