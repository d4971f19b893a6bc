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

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/report"
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
