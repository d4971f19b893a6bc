package devicelog_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/devicelog"
	"github.com/stowage-dev/stowage/memory"
)

// A log has every call with its memory and a sum that follows the order, but for calls that
// need none, and begins anew.
func TestLog(t *testing.T) {
	inner, err := cpu.Open(cpu.Options{CopyThreads: 1})
	if err != nil {
		t.Fatal(err)
	}
	dev, log := devicelog.Wrap(inner)
	s, err1 := dev.NewStream("s")
	e, err2 := dev.NewEvent(0)
	b, err3 := dev.Alloc(memory.Device, 64, "b")
	h, err4 := dev.Alloc(memory.Host, 64, "b")
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		t.Fatal(err)
	}
	sum := func(f func()) string { log.Take(); f(); return log.Take() }
	one, two := func() { s.Fill(b.Slice(0, 8), 1) }, func() { s.Fill(b.Slice(8, 8), 1) }
	if a, b := sum(func() { one(); two() }), sum(func() { two(); one() }); a == b {
		t.Error("the order of two fills makes no difference")
	}
	log.Unordered = []string{"fill s#1"}
	both, swapped := sum(func() { one(); two() }), sum(func() { two(); one() })
	if both != swapped || !strings.HasPrefix(both, "fill 2: ") {
		t.Errorf("%s, and %s in another order", both, swapped)
	}
	record := func() { s.Record(e) }
	if a, b := sum(func() { one(); record(); two() }), sum(func() { two(); record(); one() }); a == b {
		t.Error("a record between two fills makes no difference to their order")
	}
	work := s.Issued()
	s.Copy(h.All(), b.All())
	s.Wait(e)
	s.BeginCapture()
	one()
	g, err := s.EndCapture()
	if err != nil {
		t.Fatal(err)
	}
	s.Replay(g)
	got := make([]byte, 1)
	if err := s.Download(got, b.Slice(9, 1)); err != nil || got[0] != 1 || s.Issued() != work+4 {
		t.Errorf("%d, %v, %d pieces of work", got[0], err, s.Issued()-work)
	}
	if want, lines := []string{"copy s#1 b#2[0+64] b#1[0+64]", "wait s#1 event#1", "capture s#1", "fill s#1 b#1[0+8] 1", "captured s#1 graph#1 1", "replay s#1 graph#1", "download s#1 b#1[9+1]"}, log.Lines(); strings.Join(lines, "\n") != strings.Join(want, "\n") {
		t.Errorf("%q", lines)
	}
	if n := dev.Counters().HostSyncs; n != 0 {
		t.Errorf("the log counts %d waits of its own", n)
	}
	if looks := [3]bool{e.Done(), e.Done(), e.Done()}; looks != [3]bool{true, true, false} {
		t.Error("an event is done but for every third look")
	}
	s.Free(b)
	s.Free(h)
	if err := errors.Join(g.Close(), e.Close(), s.Close(), dev.Close()); err != nil {
		t.Error(err)
	}
}
