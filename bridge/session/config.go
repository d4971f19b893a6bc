// This file owns the configuration, as the caller writes it.

package session

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/policy"
	"github.com/stowage-dev/stowage/schedule"
	"github.com/stowage-dev/stowage/stash"
)

// Config is the JSON of stowage_open; stowage.h says what the keys mean.
type Config struct {
	Device  string                   `json:"device"`
	Ordinal int                      `json:"ordinal"`
	Context uint64                   `json:"context"`
	Stream  uint64                   `json:"stream"`
	Budget  device.Bytes             `json:"budget"`
	Host    device.Bytes             `json:"host"`
	Policy  map[string]policy.Choice `json:"policy"`
	Least   device.Bytes             `json:"least"`
	Pages   *Pages                   `json:"pages"`
	Rank    int                      `json:"rank"`
	Log     bool                     `json:"log"`
}

// Pages sizes the store for storages whose rows are counted on the device.
type Pages struct {
	Page      device.Bytes   `json:"page"`
	Device    schedule.Pages `json:"device"`
	Host      schedule.Pages `json:"host"`
	DeviceMax schedule.Pages `json:"device_max"`
	HostMax   schedule.Pages `json:"host_max"`
}

// Parse reads a configuration.
func Parse(text []byte) (Config, error) {
	var c Config
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&c); err != nil {
		return c, fmt.Errorf("stowage: the configuration cannot be read: %s; see stowage.h for its keys", strings.TrimPrefix(err.Error(), "json: "))
	}
	if _, err := d.Token(); err != io.EOF {
		return c, fmt.Errorf("stowage: the configuration goes on behind its end; give one JSON object")
	}
	return c, c.check()
}

func (c *Config) check() error {
	switch {
	case c.Device != "cpu" && c.Device != "cuda":
		return fmt.Errorf("stowage: device %q; give \"cpu\" or \"cuda\"", c.Device)
	case c.Budget < 0 || c.Host < 0 || c.Least < 0 || c.Ordinal < 0 || c.Rank < 0:
		return fmt.Errorf("stowage: a budget of %d, host memory of %d, least of %d bytes, ordinal %d, rank %d; none may be negative", c.Budget, c.Host, c.Least, c.Ordinal, c.Rank)
	case c.Budget > 0 && len(c.Policy) > 0:
		return fmt.Errorf("stowage: a budget and a policy both decide what leaves; give one of them")
	}
	for _, name := range slices.Sorted(maps.Keys(c.Policy)) {
		if c.Policy[name] == policy.Recompute {
			return fmt.Errorf("stowage: group %q cannot be recomputed from here; use keep, offload or stash, and the framework's own checkpointing", name)
		}
	}
	if c.Pages != nil {
		return c.Pages.check()
	}
	return nil
}

func (p *Pages) check() error {
	if p.Page != 0 && (p.Page < 4*device.KiB || p.Page > device.GiB || p.Page&(p.Page-1) != 0) {
		return fmt.Errorf("stowage: pages.page is %d bytes; give a power of two from 4 KiB to 1 GiB", int64(p.Page))
	}
	for _, x := range []struct {
		name      string
		now, most schedule.Pages
	}{{"device", p.Device, p.DeviceMax}, {"host", p.Host, p.HostMax}} {
		if x.now < 0 || x.most < 0 || max(x.now, x.most) > 1<<31 || x.most > 0 && x.most < x.now {
			return fmt.Errorf("stowage: pages.%s begins with %d and may grow to %d; give 0 <= pages <= max <= 2^31", x.name, x.now, x.most)
		}
	}
	return nil
}

// names are the choices that the runtime follows: rows go to the shelf whatever it says.
func (c *Config) names() map[string]policy.Choice {
	if len(c.Policy) == 0 {
		return nil
	}
	names := map[string]policy.Choice{}
	for name, x := range c.Policy {
		if x == policy.Stash {
			x = policy.Keep
		}
		names[name] = x
	}
	return names
}

// unasked is the most pages that a tier may grow to where nobody says: 256 GiB of pages of
// the usual size. Their numbers take 4 bytes each of device memory: 16 MiB.
const unasked = 1 << 22

// store is what the shelf gets. Without a maximum it may grow to all there is, up to a bound.
func (p Pages) store(most [device.Kinds]device.Bytes) stash.Config {
	page := p.Page
	if page <= 0 {
		page = stash.DefaultPage
	}
	limit := func(given, least schedule.Pages, kind device.Kind) schedule.Pages {
		if given > 0 {
			return given
		}
		return max(least, min(schedule.Pages(most[kind]/page), unasked))
	}
	return stash.Config{
		Page:  p.Page,
		Pages: [stash.Tiers]schedule.Pages{p.Device, p.Host},
		Max:   [stash.Tiers]schedule.Pages{limit(p.DeviceMax, p.Device, device.Accel), limit(p.HostMax, p.Host, device.Host)},
	}
}
