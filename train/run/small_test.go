// This file owns the tests of functions that whole runs hardly show: words, sizes, and what is
// read of models and disks.

package run

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"strings"
	"syscall"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train"
	"github.com/stowage-dev/stowage/train/internal/disk"
	"github.com/stowage-dev/stowage/train/internal/disk/disktest"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// Lines have as many words as fit, and at least one.
func TestWrap(t *testing.T) {
	for width, want := range map[int]string{1: "aa|bbb|c|dddd", 4: "aa|bbb|c|dddd", 5: "aa|bbb c|dddd", 6: "aa bbb|c dddd", 8: "aa bbb c|dddd", 12: "aa bbb c|dddd", 13: "aa bbb c dddd"} {
		if got := strings.ReplaceAll(wrap(" aa  bbb\nc dddd ", width), "\n", "|"); got != want {
			t.Errorf("width %d: %s, want %s", width, got, want)
		}
	}
}

// brokenOutput fails to write, or to close.
type brokenOutput struct{ write, close error }

func (o brokenOutput) Write(p []byte) (int, error) { return len(p), o.write }
func (o brokenOutput) Sync() error                 { return nil }
func (o brokenOutput) Close() error                { return o.close }

// Metrics that cannot be written name their file. Who can free space is told so.
func TestMetricsThatCannotBeWritten(t *testing.T) {
	lock, err := disk.Claim(disktest.New().Process("run"), "/disk")
	if err != nil {
		t.Fatal(err)
	}
	for no, full := range map[syscall.Errno]bool{syscall.ENOSPC: true, syscall.EDQUOT: true, syscall.EIO: false} {
		want := "cannot write d/metrics.jsonl: " + no.Error()
		if full {
			want += "; free some space, and resume the run"
		}
		f := &folder{dir: "d", lock: lock, metrics: brokenOutput{write: &fs.PathError{Op: "write", Path: "elsewhere", Err: no}}}
		err := f.record(1)
		if err == nil || err.Error() != want || !errors.Is(err, no) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	f := &folder{dir: "d", metrics: brokenOutput{close: syscall.EIO}}
	if err := f.closeFiles(); err == nil || err.Error() != "cannot close d/metrics.jsonl: "+syscall.EIO.Error() || f.metrics != nil {
		t.Errorf("closing says %v", err)
	}
}

// The table of a rank shows owners with a thousandth of either memory, and the rest together.
// Of many kinds of ranks the fullest is shown.
func TestTablesOfForecasts(t *testing.T) {
	r := RankForecast{Device: 5_000_000, Host: 3_000_000, Owners: []Owner{
		{"both", 4_000_000, 2_000_000}, {"device", 5_001, 10}, {"host", 0, 3_001}, {"little", 5_000, 3_000}, {"less", 7, 1},
	}}
	var names []string
	for line := range strings.Lines(rankText(r, true)) {
		names = append(names, strings.Join(strings.Fields(line), " "))
	}
	if got, want := strings.Join(names, "|"), "owner device host|both 3.8 MiB 1.9 MiB|device 4.9 KiB 10 B|host 0 B 2.9 KiB|others 4.9 KiB 2.9 KiB|at most together 4.8 MiB 2.9 MiB"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	var b strings.Builder
	alike := map[string][]rankKind{"a": {{0, 0, 2, 5 << 20, 1 << 20}, {1, 2, 2, 5 << 20, 1 << 20}}, "b": {{2, 4, 2, 9 << 20, 0}}, "c": {{3, 6, 2, 7 << 20, 0}}}
	if got := (&Forecast{}).table(&b, []string{"a", "b", "c"}, alike); got != "b" {
		t.Errorf("the fullest is %s", got)
	}
	if text := strings.Join(strings.Fields(b.String()), " "); text != "stages ranks count device host 0, 1 0 to 3 4 5.0 MiB 1.0 MiB 2 4, 5 2 9.0 MiB 0 B 3 6, 7 2 7.0 MiB 0 B" {
		t.Error(text)
	}
}

// All stages share the address space, and sharded parameters reserve twice as much.
func TestSpaceOfDevices(t *testing.T) {
	c := train.Config{Layout: train.Layout{PP: 4}}
	if got := spaceOf(c); got != [memory.Kinds]memory.Bytes{1 << 43, 1 << 42} {
		t.Errorf("%v", got)
	}
	c.Sharding = &train.Sharding{}
	if got := spaceOf(c); got != [memory.Kinds]memory.Bytes{1 << 42, 1 << 41} {
		t.Errorf("%v if parameters are sharded", got)
	}
}

// Sizes that are not given follow from the layers and the experts.
func TestChosenLayouts(t *testing.T) {
	models := func(layers, experts int) *model.Model {
		m := &model.Model{Layers: make([]model.Layer, layers)}
		if experts > 0 {
			m.Layers[0].MoE = &model.MoE{Experts: experts}
		}
		return m
	}
	for _, x := range []struct {
		layers, experts int
		given, want     [4]int // pp, vpp, ep, dp
	}{
		{4, 8, [4]int{}, [4]int{2, 1, 2, 2}}, {3, 8, [4]int{}, [4]int{1, 1, 2, 2}}, {4, 0, [4]int{}, [4]int{2, 1, 1, 2}}, {4, 7, [4]int{}, [4]int{2, 1, 1, 2}},
		{6, 8, [4]int{0, 2, 0, 0}, [4]int{1, 2, 2, 2}}, {8, 8, [4]int{0, 2, 0, 0}, [4]int{2, 2, 2, 2}},
		{4, 8, [4]int{0, 0, 4, 0}, [4]int{2, 1, 4, 4}}, {4, 8, [4]int{0, 0, 1, 0}, [4]int{2, 1, 1, 2}}, {4, 8, [4]int{0, 0, 0, 3}, [4]int{2, 1, 1, 3}}, {4, 8, [4]int{4, 1, 8, 16}, [4]int{4, 1, 8, 16}},
	} {
		o := Options{PP: x.given[0], VPP: x.given[1], EP: x.given[2], DP: x.given[3]}
		o.chooseLayout(models(x.layers, x.experts))
		if got := [4]int{o.PP, o.VPP, o.EP, o.DP}; got != x.want {
			t.Errorf("%d layers, %d experts, given %v: %v, want %v", x.layers, x.experts, x.given, got, x.want)
		}
	}
}

// Settings of a model are read under each of their names; whole numbers are integers as far as
// their digits count.
func TestSettingsOfAModel(t *testing.T) {
	for keys, want := range map[string]func(s *layer.Settings){
		"rms_norm_eps":            func(s *layer.Settings) { s.Epsilon = 0.5 },
		"layer_norm_epsilon":      func(s *layer.Settings) { s.Epsilon = 0.5 },
		"norm_eps":                func(s *layer.Settings) { s.Epsilon = 0.5 },
		"rope_theta":              func(s *layer.Settings) { s.Theta = 0.5 },
		"routed_scaling_factor":   func(s *layer.Settings) { s.Routing.Factor = 0.5 },
		"router_aux_loss_coef":    func(s *layer.Settings) { s.Routing.Balance = 0.5 },
		"aux_loss_alpha":          func(s *layer.Settings) { s.Routing.Balance = 0.5 },
		"something_else_of_a_key": func(s *layer.Settings) {},
	} {
		got, set := layer.DefaultSettings(), layer.DefaultSettings()
		want(&set)
		if err := (&ModelSpec{Keys: map[string]any{keys: 0.5}}).readSettings(&got); err != nil || got != set {
			t.Errorf("%s: %+v, want %+v, %v", keys, got, set, err)
		}
	}
	for _, x := range []struct{ in, want any }{
		{3.0, int64(3)}, {-3.0, int64(-3)}, {0.5, 0.5}, {int(7), int64(7)}, {uint64(math.MaxUint64), int64(math.MaxInt64)}, {"3", "3"}, {true, true},
		{float64(1<<53 - 1), int64(1<<53 - 1)}, {float64(1 << 53), float64(1 << 53)}, {1e300, 1e300}, {-1e300, -1e300},
	} {
		if got := whole(x.in); got != x.want {
			t.Errorf("%v of %T becomes %v of %T", x.in, x.in, got, got)
		}
	}
	if got := fmt.Sprint(whole(map[string]any{"a": []any{1.0, map[string]any{"b": 2.0}}})); got != "map[a:[1 map[b:2]]]" {
		t.Error(got)
	}
}

// A tab before the first word of a line is found in that line alone.
func TestIndentedByTab(t *testing.T) {
	text := []byte("a: 1\n\tb: 2\n  \tc: 3\nd:\t4\n")
	for line, want := range []bool{false, false, true, true, false, false, false, false} {
		if indentedByTab(text, line) != want {
			t.Errorf("line %d: %v", line, !want)
		}
	}
}
