// This file owns evaluations: which steps have one, and which figures of a contestant or a
// run belong to what was trained last.

package run

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"reflect"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/train/internal/disk/disktest"
)

// cancelling cancels a context when a line is written that contains a text.
type cancelling struct {
	at     string
	cancel func()
}

func (c cancelling) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte(c.at)) {
		c.cancel()
	}
	return len(p), nil
}

// A step has a loss on held-out text if one is due and only then, also if the run is interrupted in
// it: the run that goes on begins behind it. An interrupted run has the loss of its last step, if
// that has one.
func TestEvaluationsAreOfTheirStep(t *testing.T) {
	for _, stop := range []string{"", "step 3/", "step 2/"} {
		o := tiny()
		o.Steps, o.SaveEvery, o.HoldOut, o.EvalEvery = 5, 0, 0.2, 2
		if stop == "step 2/" {
			o.EvalEvery = 1 // one would be due
		}
		j := jobOf(t, o)
		d := disktest.New()
		j.fs, j.NoTrace = d.Process("run"), true
		ctx, cancel := context.WithCancel(context.Background())
		var w io.Writer = io.Discard
		last := 5
		if stop != "" {
			w, last = cancelling{"held out", cancel}, o.EvalEvery+1 // after the first evaluation, in the step behind it
		}
		s, err := j.Run(ctx, "/disk/run", false, NewProgress(w, nil, nil))
		cancel()
		if (err != nil) != (stop != "") || (s.Eval == nil) != (stop == "step 3/") {
			t.Errorf("stopped at %q: %+v, %v", stop, s, err)
		}
		text, err := d.Contents("/disk/run/" + metricsName)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); n++ {
			var l line
			if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
				t.Fatal(err)
			}
			if due := l.Step%o.EvalEvery == 0 || l.Step == 5; (l.Eval != nil) != due {
				t.Errorf("stopped at %q: step %d has an evaluation: %v", stop, l.Step, l.Eval != nil)
			}
		}
		if n != last {
			t.Errorf("stopped at %q: %d lines", stop, n)
		}
	}
}

// A contestant that is opened with another budget keeps nothing of the one before.
func TestContestantBeginsAnew(t *testing.T) {
	j := jobOf(t, tiny())
	c := &contestant{name: "none", took: []float64{1}, expected: 5, traces: &tracing{}}
	c.told = notes{spilled: 3, took: []float64{1}, written: []peak{{1, 2}}, before: []peak{{3, 4}}}
	if err := c.open(j, memory.Links{Out: 1e9, In: 1e9}, 0); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(c.told, notes{}) || c.took != nil || c.expected != 0 || c.traces != nil {
		t.Errorf("%+v", c)
	}
	if err := c.t.Close(); err != nil {
		t.Error(err)
	}
}
