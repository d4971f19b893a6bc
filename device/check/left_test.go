package check

import (
	"errors"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
)

// Every kind of handle that a program leaves open is found, with where it was made, and
// what it closes is not. The checker itself keeps nothing of a closed device.
func TestLeftOpen(t *testing.T) {
	open := func() (device.Device, error) { return cpu.Open(cpu.Options{}) }
	for _, want := range []string{"", `stream "s" made at check/left_test.go:`, "an event made at check/left_test.go:", "a graph made at check/left_test.go:"} {
		work := func(d device.Device) error {
			s, err := d.NewStream("s")
			if err != nil {
				return err
			}
			e, err := d.NewEvent(device.External)
			if err != nil {
				return err
			}
			s.BeginCapture()
			s.Record(e)
			g, err := s.EndCapture()
			if err != nil {
				return err
			}
			for what, closed := range map[string]func() error{"event": e.Close, "graph": g.Close, "stream": s.Close} {
				if !strings.Contains(want, what) {
					err = errors.Join(err, closed())
				}
			}
			return err
		}
		_, each := FailEach(Allocs, 1, open, work)
		c := New(Options{})
		for _, err := range []error{each, Explore(Options{}, 2, On(open, work)), On(open, work)(c)} {
			if (err == nil) != (want == "") || err != nil && (!strings.Contains(err.Error(), want) || strings.Count(err.Error(), "made at") != 1) {
				t.Errorf("%v, want %q", err, want)
			}
		}
		ended := want == "" || strings.HasPrefix(want, "stream") // with its device
		if err := c.devs[0].Left(); (err == nil) != ended || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v is left, want %q", err, want)
		}
		if len(c.lanes) > 0 || len(c.borrowed) > 0 || len(c.devs[0].streams) > 0 || len(c.devs[0].live) > 0 {
			t.Errorf("a closed device leaves %d lanes, %d borrowed buffers, %d streams and %d buffers", len(c.lanes), len(c.borrowed), len(c.devs[0].streams), len(c.devs[0].live))
		}
	}
}
